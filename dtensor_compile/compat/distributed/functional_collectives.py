"""What the collectives of ``torch.distributed`` are made of: functional operators, works in flight, reductions by name.

Also the hooks through which an operator of ours fits in: what it means to functionalization, that nobody may drop it,
and that Inductor keeps it in order with torch's collectives.
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

#: Reductions by the names under which torch's functional collectives know them.
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

#: A list of tensors as one flat tensor, and back: how gradients go into the buckets of a collective.
flatten_dense_tensors, unflatten_dense_tensors = (
    torch._utils._flatten_dense_tensors,
    torch._utils._unflatten_dense_tensors,
)


def reduction_name(value: Any) -> str | None:
    """The name of a reduction; None for one that is no plain reduction (a premultiplied sum)."""
    return next((name for name, op in REDUCTIONS.items() if value == op), None)


def functions_of(module: types.ModuleType, *names: str) -> list[Callable[..., Any]]:
    """The functions of those names that this release has."""
    return [getattr(module, name) for name in names if hasattr(module, name)]


def other_names(*names: str) -> list[Callable[..., Any]]:
    """Functions of c10d under names that some releases have and that ``torch.distributed`` need not show."""
    return functions_of(distributed_c10d, *names)


def functional(name: str) -> torch._ops.OpOverload:
    """torch's functional collective of that name: starts, and returns what `wait_tensor` waits for."""
    return getattr(torch.ops._c10d_functional, name).default


wait_tensor = torch.ops._c10d_functional.wait_tensor.default


def wait_later(tensor: torch.Tensor, work: dist.Work | None) -> None:
    """Whoever calls `wait_tensor` on `tensor` waits for `work`."""
    if work is not None:
        _register_work(tensor, work)


class _Messages(Work):
    """Messages that are one collective: waited for within the time-out of the group, as gloo waits for its collectives.

    A message itself is waited for as long as the group was made for, whatever time-out was set since.
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
    """Whoever calls `wait_tensor` on `tensor` waits for messages over a group of gloo's, and raises where its time-out
    is over.
    """
    if works:
        _register_work(tensor, _Messages(works, group))


def keep_in_place(op: torch._ops.OpOverload) -> None:
    """No pass may drop a node of `op`, whether its result is used or not."""
    has_side_effect(op)


def run_once(node: torch.fx.Node, backward: bool) -> None:
    """The partitioner leaves a node of the joint graph where it was traced, forward or backward, and saves what it
    returns.

    A second run would be a message that no other rank expects. `backward`: it uses a gradient that comes in.
    """
    backward = backward or traced_in_backward(node)
    for result in (node, *(user for user in node.users if user.target is operator.getitem)):
        result.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        result.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


def stay_where_traced(node: torch.fx.Node) -> None:
    """The partitioner leaves a node in forward or in backward, as it was traced, but for what a user's checkpoint runs
    again.
    """
    if node.meta.get("recompute") is None:
        node.meta["partitioner_tag"] = "must_be_in_backward" if traced_in_backward(node) else "must_be_in_forward"


def run_in_backward(node: torch.fx.Node) -> None:
    """The partitioner puts a node in backward that was traced in forward, which does not need it."""
    if node.meta.get("recompute") is None:
        node.meta["partitioner_tag"] = "must_be_in_backward"


def keep_for_backward(node: torch.fx.Node) -> None:
    """The partitioner saves what a node of the forward returns, also in a region that is recomputed."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def run_again_in_backward(node: torch.fx.Node) -> None:
    """The partitioner runs a node of the forward in backward too, and does not save what it returns."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def traced_in_backward(node: torch.fx.Node) -> bool:
    """Whether a node of the joint graph was traced in backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def hide_mutation_from_autograd(op: torch._ops.OpOverload) -> None:
    """Functionalization of ``op(Tensor(a!) x, Tensor value)``: from here on `x` is `value`, and autograd does not know.

    As with a kernel that writes into the memory of `x`: its ``grad_fn`` and version stay, and a tensor that autograd
    has saved earlier holds what was written.
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
    """Inductor treats `op` as it treats torch's collectives: opaque, never dropped, in the order of the graph."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch.utils._pytree import tree_map

    def lower(*args: Any) -> Any:
        return tree_map(ir.TensorBox.create, ir._CollectiveKernel.create_out_of_place(op, *args))

    register_lowering(op, type_promotion_kind=None)(lower)


def lower_as_effect(op: torch._ops.OpOverload) -> None:
    """Inductor calls `op` as it is, and never drops the call, though nobody reads the result."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch.utils._pytree import tree_map

    class Effect(ir.FallbackKernel):
        def has_side_effects(self) -> bool:
            return True

    def lower(*args: Any) -> Any:
        return tree_map(ir.TensorBox.create, Effect.create(op, *args))

    register_lowering(op, type_promotion_kind=None)(lower)


#: Whether torch traces messages itself, where its switch is on.
_HAS_SWITCH = "enable_p2p_compilation" in cast("ConfigModule", dynamo_config)._config


class P2POpClassVariable(UserDefinedClassVariable):
    """``torch.distributed.P2POp``: torch makes its objects while it traces, where its switch for messages between ranks
    is on.
    """

    def call_function(
        self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        with dynamo_config.patch(enable_p2p_compilation=True) if _HAS_SWITCH else contextlib.nullcontext():
            return super().call_function(tx, args, kwargs)
