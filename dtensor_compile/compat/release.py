"""Which torch releases are supported, and the error for all others."""

from __future__ import annotations

import torch

from dtensor_compile.errors import UnsupportedTorchError

#: Minor releases on which the tests of this package ran.
SUPPORTED = ("2.13",)


def minor_release(version: str) -> str:
    """``"2.13.0+cpu"`` -> ``"2.13"``."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_release(version: str = torch.__version__) -> None:
    """Raises `UnsupportedTorchError`, naming the supported releases, unless `version` is one of them."""
    if minor_release(version) not in SUPPORTED:
        raise UnsupportedTorchError(
            f"dtensor_compile does not support torch {version}. Supported: {', '.join(s + '.x' for s in SUPPORTED)}. "
            f'Install one of them, for instance: pip install "torch=={SUPPORTED[0]}.*"'
        )
