"""Symbolic sizes: hints that planning may use without adding a guard."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Stands for a size that only the data decides, so that a plan can be made for it at all.
UNKNOWN_SIZE = 1024


def size_hint(size: int | torch.SymInt) -> int:
    """The size seen while tracing; `UNKNOWN_SIZE` where there is none."""
    if isinstance(size, int):
        return size
    return size.node.hint if size.node.has_hint() else UNKNOWN_SIZE


def size_hints(shape: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    """`size_hint` of every dim."""
    return tuple(size_hint(size) for size in shape)
