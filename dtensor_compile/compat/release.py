"""Which torch releases are supported, and what happens with all others.

A release that is newer than those runs, with one warning (`patches.warn_of_untried_release`); any other one is refused.
The environment variable ``DTENSOR_COMPILE_TORCH`` decides otherwise: ``known`` refuses newer releases too, ``any``
refuses none.
"""

from __future__ import annotations

import os
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


def is_untried(version: str = torch.__version__) -> bool:
    """Whether a release is none of the supported ones."""
    return minor_release(version) not in SUPPORTED


def check_release(version: str = torch.__version__) -> None:
    """Decides whether the package runs on a release of torch. Warns where that is supported in part.

    Raises:
        UnsupportedTorchError: it does not. The message says how far the release is from the supported ones.
        ValueError: ``DTENSOR_COMPILE_TORCH`` is neither ``known`` nor ``any``.
    """
    policy = os.environ.get("DTENSOR_COMPILE_TORCH", "")
    if policy not in ("", "known", "any"):
        raise ValueError(f"DTENSOR_COMPILE_TORCH is {policy!r}; it may be 'known' or 'any'")
    minor = minor_release(version)
    if minor in IN_PART:
        warnings.warn(f"dtensor_compile supports torch {version} in part: {IN_PART[minor]}", stacklevel=2)
    is_newer = _number(minor) > max(map(_number, SUPPORTED))
    if is_untried(version) and policy != "any" and (policy == "known" or not is_newer):
        raise UnsupportedTorchError(
            f"dtensor_compile does not support torch {version}. {_how_far_it_is(minor)} "
            f"Supported: {', '.join(s + '.x' for s in SUPPORTED)}. "
            f'Install one of them, for instance: pip install "torch=={SUPPORTED[0]}.*"; '
            "or set DTENSOR_COMPILE_TORCH=any to try this one."
        )
