"""The supported torch releases, and the handling of all others.

Releases newer than those run, with one warning (`patches.warn_of_untried_release`); all others are an error. The
environment variable ``DTENSOR_COMPILE_TORCH`` changes that: ``known`` refuses newer releases too, ``any`` accepts all.
"""

from __future__ import annotations

import os
import warnings

import torch

from dtensor_compile.errors import UnsupportedTorchError

#: Supported minor releases, the primary one first; ``docs/releases.md`` has the test results of each.
SUPPORTED = ("2.13", "2.14", "2.15", "2.11")

#: The partly supported ones, with the reason that the warning on import gives.
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
    """Whether a release is not a supported one."""
    return minor_release(version) not in SUPPORTED


def check_release(version: str = torch.__version__) -> None:
    """Checks that the package runs on a torch release; warns if it is supported in part.

    Raises:
        UnsupportedTorchError: it does not; says whether `version` is newer or older, and names the supported ones.
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
