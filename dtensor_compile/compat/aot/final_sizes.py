"""Sizes that a graph returns with its DTensors, and that become numbers while it is traced.

AOTAutograd plans the results of a graph before it traces the backward pass. A DTensor of symbolic sizes is several: its
local tensor, its mesh, and an integer per symbol. Where how a gradient is cut needs to know that a size is even, or
less than the number of ranks, the symbol can be left with one value (``2 <= s < 3``): the traced graph returns no
integer for it, and every later result is taken for the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch

T = TypeVar("T")


class _PlannedTooEarly(Exception):
    """A size that the plan of the results has as a symbol is a number now."""


def plan_until_sizes_stay(compile: Callable[[], T]) -> T:
    """What `compile`, which calls AOTAutograd, returns; it is called again where a size became a number after the plan
    was made.

    It ends: a size that is a number is none of the symbols of the next plan.
    """
    while True:
        try:
            with _plans_checked():
                return compile()
        except _PlannedTooEarly:
            continue


_UNWRAP = patch(
    "torch._functorch._aot_autograd.graph_capture:aot_dispatch_subclass",
    "flat_fn_maybe_joint args args_descs is_joint_structure meta fw_only",
)
_CREATE = patch("torch._functorch._aot_autograd.graph_capture:_create_graph", "f args ...")


@needs(
    "results whose sizes become numbers in the backward pass",
    _UNWRAP,
    _CREATE,
    without="such a graph returns too little",
    essential=True,
    upstream="#152963",
    remove_when="AOTAutograd plans the results of subclasses after the joint graph is traced",
)
@contextlib.contextmanager
def _plans_checked() -> Iterator[None]:
    """While active, a graph traced on this thread that returns fewer integers than planned is an error, before
    any pass sees it.
    """
    planned: list[torch.SymInt] = []

    def unwrap(stock: Any, *args: Any, meta: Any, **kwargs: Any) -> Any:
        planned[:] = _symbols(meta.subclass_fw_graph_out_meta)
        return stock(*args, meta=meta, **kwargs)

    def create(stock: Any, *args: Any, **kwargs: Any) -> Any:
        graph = stock(*args, **kwargs)
        if any(size.node.expr.is_number for size in planned):
            raise _PlannedTooEarly
        return graph

    with patched(_UNWRAP, unwrap), patched(_CREATE, create):
        yield


def _symbols(results: list[Any]) -> list[torch.SymInt]:
    """Sizes and strides that a plan has as integers of their own."""
    extents = [(*meta.outer_size, *meta.outer_stride) for meta in results if isinstance(meta, SubclassCreationMeta)]
    return [size for extent in extents for size in extent if isinstance(size, torch.SymInt)]
