"""Which torch releases are supported, and the error for all others."""

from __future__ import annotations

import torch

from dtensor_compile.errors import UnsupportedTorchError

#: Minor releases on which the tests of this package ran.
SUPPORTED = ("2.13",)

#: What is known to break on others.
KNOWN_TO_BREAK = {
    "2.11": "meshes, process groups and placements are not opaque objects there, which is what the trackers of this package extend",
    "2.14": "Dynamo asks its trackers through other slots there, and the API of opaque objects, which those of this package extend, has other names",
}


def minor_release(version: str) -> str:
    """``"2.13.0+cpu"`` -> ``"2.13"``."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_release(version: str = torch.__version__) -> None:
    """Raises `UnsupportedTorchError`, naming the supported releases and what breaks, unless `version` is one of them."""
    if minor_release(version) not in SUPPORTED:
        breaks = KNOWN_TO_BREAK.get(minor_release(version), "it was never tried there")
        raise UnsupportedTorchError(
            f"dtensor_compile does not support torch {version}: {breaks}. Supported: {', '.join(s + '.x' for s in SUPPORTED)}. "
            f'Install one of them, for instance: pip install "torch=={SUPPORTED[0]}.*"'
        )
