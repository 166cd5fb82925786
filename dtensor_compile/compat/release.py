"""Which torch releases are supported, and the error for all others."""

from __future__ import annotations

import warnings

import torch

from dtensor_compile.errors import UnsupportedTorchError

#: Minor releases that are allowed, the primary one first; ``docs/releases.md`` has what each of them gave.
SUPPORTED = ("2.13", "2.14")

#: Of these, the ones that an import warns of, and why.
IN_PART = {"2.14": "its catalogue passes as on 2.13 but for one program, and only part of the tests ran there (docs/releases.md)"}

#: What is known to break in releases that were looked at.
BREAKS = {
    "2.11": "a collective of constants is carried out while tracing and can wait for ever, and hooks of tensors and data-parallel modules "
    "are errors of the compilation (docs/releases.md)",
}


def minor_release(version: str) -> str:
    """``"2.13.0+cpu"`` -> ``"2.13"``."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _number(minor: str) -> tuple[int, ...]:
    return tuple(int(digits) if (digits := "".join(filter(str.isdigit, part))) else 0 for part in minor.split("."))


def _known_to_break(minor: str) -> str:
    if minor in BREAKS:
        return f"Known to break: {BREAKS[minor]}."
    if _number(minor) > max(map(_number, SUPPORTED)):
        return "It is newer than all that were tried: private functions of torch that this package replaces may have changed."
    if _number(minor) < min(map(_number, BREAKS)):
        return f"It is older than all that were tried; what breaks with {min(BREAKS, key=_number)} breaks there too."
    return "It was not tried; it lies between releases of which one is known to break."


def check_release(version: str = torch.__version__) -> None:
    """Raises `UnsupportedTorchError`, with what is known to break and the supported releases, unless `version` is one of them.

    Warns where one is supported in part.
    """
    minor = minor_release(version)
    if minor in IN_PART:
        warnings.warn(f"dtensor_compile supports torch {version} in part: {IN_PART[minor]}", stacklevel=2)
    if minor not in SUPPORTED:
        raise UnsupportedTorchError(
            f"dtensor_compile does not support torch {version}. {_known_to_break(minor)} "
            f"Supported: {', '.join(s + '.x' for s in SUPPORTED)}. "
            f'Install one of them, for instance: pip install "torch=={SUPPORTED[0]}.*"'
        )
