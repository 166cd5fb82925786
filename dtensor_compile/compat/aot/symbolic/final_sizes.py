"""Sizes that a graph returns with its DTensors, and that are specialized during the trace.

AOTAutograd plans the results of a graph before it traces the backward. A DTensor with symbolic sizes is flattened to
its local tensor, its mesh, and one integer per symbol. If the placement of a gradient needs to know that a size is
even, or less than the number of ranks, the symbol can be left with one value (``2 <= s < 3``): the traced graph returns
no integer for it, and every later result is taken for its predecessor.
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
    """A size that is a symbol in the plan of the results is an integer now."""


def plan_until_sizes_stay(compile: Callable[[], T]) -> T:
    """The result of `compile`, which calls AOTAutograd; repeats it if a size was specialized after the plan was made.

    Terminates: a specialized size is not a symbol of the next plan.
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
    "results whose sizes are specialized in the backward pass",
    _UNWRAP,
    _CREATE,
    without="such a graph returns too few results",
    essential=True,
    upstream="#152963",
    remove_when="AOTAutograd plans the results of subclasses after the joint graph is traced",
)
@contextlib.contextmanager
def _plans_checked() -> Iterator[None]:
    """While active, a graph traced on this thread that returns fewer integers than planned is an error, before any pass
    runs."""
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
    """Symbolic sizes and strides that a plan returns as separate integers."""
    extents = [(*meta.outer_size, *meta.outer_stride) for meta in results if isinstance(meta, SubclassCreationMeta)]
    return [size for extent in extents for size in extent if isinstance(size, torch.SymInt)]
