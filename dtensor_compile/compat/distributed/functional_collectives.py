"""Functional collectives of ``torch.distributed``, their work handles, and names of reductions.

Also integrates operators of ours: functionalization, side effects that prevent dead code elimination, and an Inductor
lowering in order with torch's collectives.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import operator
import time
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work, _register_work
from torch._dynamo import config as dynamo_config
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch._prims_common import is_contiguous_or_false
from torch.distributed import _functional_collectives, distributed_c10d
from torch.fx.node import has_side_effect
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from torch.utils._config_module import ConfigModule

#: Reductions by their names in torch's functional collectives.
REDUCTIONS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}

#: torch's module of functional collectives.
functional_collectives = _functional_collectives

#: Flatten a list of tensors into one and back, as gradients are put into buckets.
flatten_dense_tensors, unflatten_dense_tensors = (
    torch._utils._flatten_dense_tensors,
    torch._utils._unflatten_dense_tensors,
)


def reduction_name(value: Any) -> str | None:
    """The name of a reduction; None if it is not a plain one (a premultiplied sum)."""
    return next((name for name, op in REDUCTIONS.items() if value == op), None)


def functions_of(module: types.ModuleType, *names: str) -> list[Callable[..., Any]]:
    """The functions of those names that the installed release has."""
    return [getattr(module, name) for name in names if hasattr(module, name)]


def other_names(*names: str) -> list[Callable[..., Any]]:
    """Functions of c10d that only some releases have, and that ``torch.distributed`` need not export."""
    return functions_of(distributed_c10d, *names)


def functional(name: str) -> torch._ops.OpOverload:
    """torch's functional collective of that name: starts, and returns a tensor for `wait_tensor`."""
    return getattr(torch.ops._c10d_functional, name).default


wait_tensor = torch.ops._c10d_functional.wait_tensor.default
#: Waits for several results of one collective; None before 2.15.
wait_tensors: torch._ops.OpOverload | None = (
    torch.ops._c10d_functional.wait_tensors.default if hasattr(torch.ops._c10d_functional, "wait_tensors") else None
)


def wait_later(tensor: torch.Tensor, work: dist.Work | None) -> None:
    """Makes `wait_tensor` on `tensor` wait for `work`."""
    if work is not None:
        _register_work(tensor, work)


class _Messages(Work):
    """Messages that make up one collective; waits for all of them within the timeout of the group, as gloo's
    collectives do.

    A single message waits as long as the timeout with which the group was made, whatever timeout was set since.
    """

    def __init__(self, works: Sequence[Work], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.works, self.group = works, group

    def wait(self, timeout: datetime.timedelta = datetime.timedelta()) -> bool:
        allowed = timeout or self.group._get_backend(torch.device("cpu")).options._timeout
        until = time.monotonic() + allowed.total_seconds()
        for work in self.works:
            work.wait(datetime.timedelta(seconds=max(until - time.monotonic(), 0.001)))
        return True


def wait_for_messages(tensor: torch.Tensor, works: Sequence[dist.Work], group: dist.ProcessGroup) -> None:
    """Makes `wait_tensor` on `tensor` wait for messages over a gloo group; it raises if the group's timeout expires."""
    if works:
        _register_work(tensor, _Messages(works, group))


def keep_in_place(op: torch._ops.OpOverload) -> None:
    """Marks `op` as having side effects: no pass may drop a node of it, even if its result is unused."""
    has_side_effect(op)


def run_once(node: torch.fx.Node, backward: bool) -> None:
    """Makes the partitioner keep a node of the joint graph in the pass where it was traced, and save its result.

    A second run would be a message that no other rank expects.

    Args:
        backward: the node uses a tangent.
    """
    backward = backward or traced_in_backward(node)
    for result in (node, *(user for user in node.users if user.target is operator.getitem)):
        result.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        result.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


def stay_where_traced(node: torch.fx.Node) -> None:
    """Makes the partitioner keep a node in the pass where it was traced, unless a user's checkpoint recomputes it."""
    if node.meta.get("recompute") is None:
        node.meta["partitioner_tag"] = "must_be_in_backward" if traced_in_backward(node) else "must_be_in_forward"


def run_in_backward(node: torch.fx.Node) -> None:
    """Makes the partitioner put a node into the backward that was traced in the forward, which does not need it."""
    if node.meta.get("recompute") is None:
        node.meta["partitioner_tag"] = "must_be_in_backward"


def keep_for_backward(node: torch.fx.Node) -> None:
    """Makes the partitioner save the result of a forward node, even in a region that is recomputed."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def run_again_in_backward(node: torch.fx.Node) -> None:
    """Makes the partitioner recompute a forward node in the backward instead of saving its result."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def traced_in_backward(node: torch.fx.Node) -> bool:
    """Whether a node of the joint graph was traced in the backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def hide_mutation_from_autograd(op: torch._ops.OpOverload) -> None:
    """Functionalizes ``op(Tensor(a!) x, Tensor value)``: `x` is `value` from here on, hidden from autograd.

    As with a kernel that writes into the memory of `x`: ``grad_fn`` and version stay, and a tensor that autograd saved
    earlier holds the new values.
    """

    @op.py_functionalize_impl
    def replace(ctx: Any, x: torch.Tensor, value: torch.Tensor) -> None:
        old, new = ctx.unwrap_tensors((x, value))
        with ctx.redispatch_to_next():
            plain = old.dtype == new.dtype and is_contiguous_or_false(old) and is_contiguous_or_false(new)
            written = new if plain else torch.ops.aten.copy.default(old, new)
        ctx.replace(x, written)
        ctx.mark_mutation_hidden_from_autograd(x)
        ctx.commit_update(x)
        ctx.sync(x)


@functools.cache
def lower_as_collective(op: torch._ops.OpOverload) -> None:
    """Makes Inductor treat `op` like torch's collectives: opaque, never dropped, in the order of the graph."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch.utils._pytree import tree_map

    def lower(*args: Any) -> Any:
        return tree_map(ir.TensorBox.create, ir._CollectiveKernel.create_out_of_place(op, *args))

    register_lowering(op, type_promotion_kind=None)(lower)


def lower_as_effect(op: torch._ops.OpOverload) -> None:
    """Makes Inductor call `op` as it is and never drop the call, even if the result is unused."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch.utils._pytree import tree_map

    class Effect(ir.FallbackKernel):
        def has_side_effects(self) -> bool:
            return True

    def lower(*args: Any) -> Any:
        return tree_map(ir.TensorBox.create, Effect.create(op, *args))

    register_lowering(op, type_promotion_kind=None)(lower)


#: Whether torch has a setting for tracing point-to-point messages itself.
_HAS_SWITCH = "enable_p2p_compilation" in cast("ConfigModule", dynamo_config)._config


class P2POpClassVariable(UserDefinedClassVariable):
    """``torch.distributed.P2POp``: enables torch's tracing of point-to-point messages while an object is
    constructed."""

    def call_function(
        self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        with dynamo_config.patch(enable_p2p_compilation=True) if _HAS_SWITCH else contextlib.nullcontext():
            return super().call_function(tx, args, kwargs)
