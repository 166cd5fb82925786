"""Programs that write to inputs which share memory through a DTensor run operator by operator.

AOTAutograd finds aliased inputs by their storages, and a DTensor does not expose the storage of its local tensor (nor
does an AsyncCollectiveTensor). Two DTensors over one local tensor, or a DTensor and its local tensor, then count as two
values, and a write to one does not reach the other:

    x, y over one local tensor: x.add_(1); return x + y      # compiled alone: y is still what it was

Whether inputs share memory may change from call to call, so the compiled code of a program that writes checks at each
call, and runs the traced program itself if they do; the first such call is a decision. Programs without writes are not
checked.

Upstream: https://github.com/pytorch/pytorch/issues/114415 (AOTAutograd should detect aliasing of inputs that happens
    *below* subclasses); https://github.com/pytorch/pytorch/pull/186517 (Detect aliased subclass inputs after
    desugaring; closed, would raise an error).
Releases: 2.11 to 2.14.
Remove when: AOTAutograd regenerates input aliasing after tensor subclasses are unwrapped (an error is not enough).
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor_compile.compat.aot.async_inputs import async_inputs, writes_are_kept
from dtensor_compile.compat.dtensor.specs import in_storages_of_their_own, memory_of, writes_to_arguments
from dtensor_compile.decisions import Decision

#: Python's operators that write to their first argument: ``x += y``, ``x[i] = y``.
_WRITING = {
    operator.setitem,
    *(
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.imatmul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
    ),
    *(operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
}


def may_write(gm: torch.fx.GraphModule) -> bool:
    """Whether some node of a Dynamo graph may write to a tensor in place: judged by its name, its schema or its
    arguments.
    """
    return any(
        writes_in_place(node)
        for module in gm.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    )


def writes_in_place(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph may write to a tensor in place."""
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return writes_to_arguments(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in _WRITING or name == "__setitem__" or "out" in node.kwargs or _passes_inplace(node)


def _passes_inplace(node: torch.fx.Node) -> bool:
    """Whether the argument ``inplace`` of a function is true, whether it is passed by name or by position."""
    place = _place_of_inplace(node.target) if callable(node.target) else None
    return bool(node.kwargs.get("inplace", place is not None and place < len(node.args) and node.args[place]))


@functools.lru_cache(maxsize=1024)
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # not a function of Python
        return None
    return names.index("inplace") if "inplace" in names else None


def shares_memory(values: tuple[Any, ...], asynchronous: bool = False) -> bool:
    """Whether two of `values` are one tensor, or share memory that at least one of them holds in an inner tensor, as a
    DTensor does.

    Args:
        asynchronous: whether AsyncCollectiveTensors, which hide the storage of their inner tensor, are among them.
    """
    if not asynchronous and in_storages_of_their_own(values):
        return False
    tensors = [id(value) for value in values if isinstance(value, torch.Tensor)]
    if len(set(tensors)) < len(tensors):
        return True  # torch passes each tensor once; one of an optimizer's state may have become another one since
    spans: dict[int, list[tuple[int, int, bool]]] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            memory = memory_of(value)
            if memory is not None:
                spans.setdefault(memory.storage, []).append((memory.start, memory.end, memory.held))
    return any(_overlap(sorted(shared)) for shared in spans.values() if len(shared) > 1)


def _overlap(spans: Sequence[tuple[int, int, bool]]) -> bool:
    """Whether two of these spans, sorted by start, overlap, at least one of them of an inner tensor."""
    return any(
        a_held or b_held
        for i, (_, a_end, a_held) in enumerate(spans)
        for b_start, _, b_held in spans[i + 1 :]
        if b_start < a_end
    )


def check_aliases(
    gm: torch.fx.GraphModule,
    compiled: Callable[..., Any],
    decided: Callable[[list[Decision]], None],
    communication: Callable[[], float],
) -> Callable[..., Any]:
    """A function that runs `compiled` on inputs that share no memory through a DTensor, and `gm` on others.

    Args:
        decided: receives a decision at the first call of `gm`.
        communication: returns the estimated seconds of the collectives of a step, all of them exposed in eager.
    """
    if not may_write(gm):
        return compiled
    inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    asynchronous = bool(async_inputs(inputs))
    lost = asynchronous and not writes_are_kept()
    reported = False

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        nonlocal reported
        if not lost and not shares_memory(args, asynchronous):
            return compiled(*args)
        if not reported:
            reported = True
            decided([_runs_in_eager(LOST if lost else SHARED, communication())])
        return gm(*args)

    return run


#: Why calls run in eager.
SHARED = (
    "inputs share memory through a DTensor and the program writes to one: calls with such inputs run operator by "
    "operator"
)
LOST = (
    "the program writes to an input that was not waited for, which this release of torch would lose: it runs in eager"
)


def _runs_in_eager(reason: str, seconds: float) -> Decision:
    return Decision("aliased_inputs", "", reason, "compiled graph", "eager", left_alone=True, seconds=seconds)
