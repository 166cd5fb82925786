"""Which torch releases are supported, and the error for all others."""

from __future__ import annotations

import warnings

import torch

from dtensor_compile.errors import UnsupportedTorchError

#: Minor releases that are allowed, the primary one first; ``docs/releases.md`` has what each of them gave.
SUPPORTED = ("2.13", "2.14", "2.15", "2.11")

#: Of these, the ones that an import warns of, and why.
IN_PART = {
    "2.11": "the C++ part is not used there, which makes calls slower, and some programs break the graph that do not "
    "on 2.13; each feature "
    "that torch 2.11 lacks functions for warns when it would be used (docs/releases.md)",
}


def minor_release(version: str) -> str:
    """``"2.13.0+cpu"`` -> ``"2.13"``."""
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])


def _number(minor: str) -> tuple[int, ...]:
    return tuple(int(digits) if (digits := "".join(filter(str.isdigit, part))) else 0 for part in minor.split("."))


def _how_far_it_is(minor: str) -> str:
    tried = [*map(_number, SUPPORTED)]
    if _number(minor) > max(tried):
        return (
            "It is newer than all that were tried: private functions of torch that this package replaces may have "
            "changed."
        )
    return "It is older than all that were tried." if _number(minor) < min(tried) else "It was not tried."


def check_release(version: str = torch.__version__) -> None:
    """Raises `UnsupportedTorchError`, with how far it is from the supported releases and their names, unless `version`
    is one of them.

    Warns where one is supported in part.
    """
    minor = minor_release(version)
    if minor in IN_PART:
        warnings.warn(f"dtensor_compile supports torch {version} in part: {IN_PART[minor]}", stacklevel=2)
    if minor not in SUPPORTED:
        raise UnsupportedTorchError(
            f"dtensor_compile does not support torch {version}. {_how_far_it_is(minor)} "
            f"Supported: {', '.join(s + '.x' for s in SUPPORTED)}. "
            f'Install one of them, for instance: pip install "torch=={SUPPORTED[0]}.*"'
        )
