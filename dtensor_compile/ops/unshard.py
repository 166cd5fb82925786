"""The semantics of data-parallel wrappers, as functions of a graph.

A wrapper defines the tensor that the forward uses in place of a parameter, and the reduction of its gradient. Both are
one function of the parameter here, with the second as the gradient of the first:

    unshard(param, ...)           sharded DTensor -> whole tensor;  gradient: mean over the ranks, as a sharded DTensor,
                                                                    or none: it is held until a later pass reduces it,
                                                                    whole, or its shard, which waits for replicas
    average_gradient(param, ...)  the parameter itself;             gradient: mean over the ranks

AOTAutograd traces them into the joint graph as casts, ``dtensor_compile::redistribute`` nodes and divisions, so that
communication of wrappers is planned with everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from dtensor_compile.compat.aot.fx import recomputed_in_backward
from dtensor_compile.compat.distributed import fsdp, fsdp_gradients
from dtensor_compile.compat.distributed.device_meshes import real_mesh
from dtensor_compile.compat.distributed.functional_collectives import functional, wait_tensor
from dtensor_compile.compat.dtensor.specs import (
    Placement,
    Spec,
    local_and_spec,
    make_spec,
    redistribute_local,
    with_local,
)
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.ops.groups import Group, mark_rank_uniform, send_with
from dtensor_compile.ops.held_gradients import hold_gradient, hold_shard, with_held_gradient, with_held_shard


class Reduction(NamedTuple):
    """The reduction of gradients to their mean.

    Attributes:
        dtype: dtype in which they are reduced; None keeps that of the gradient.
        op: ``"avg"`` or ``"sum"``.
        before, after: divisors of the input and of the result of the reduction; 1 for none.
    """

    dtype: torch.dtype | None = None
    op: str = "avg"
    before: float = 1
    after: float = 1

    @classmethod
    def of(cls, sharded: fsdp.Sharded) -> Reduction:
        """The reduction of a gradient under ``fully_shard``."""
        return cls(sharded.reduce_dtype, *sharded.divide)


class _Outer(NamedTuple):
    """The DTensor that a module uses.

    Attributes:
        data_parallel: dims of its mesh over which the wrapper itself reduces gradients.
    """

    mesh: Any
    placements: tuple[Placement, ...]
    data_parallel: tuple[int, ...] = ()

    @classmethod
    def of(cls, sharded: fsdp.Sharded) -> _Outer | None:
        if sharded.outer_mesh is None:
            return None
        return cls(sharded.outer_mesh, sharded.outer_placements, sharded.data_parallel)

    def spec(self, sharded: Spec, dtype: torch.dtype) -> Spec:
        """Spec of the unsharded parameter, given that of the sharded one."""
        assert sharded.tensor_meta is not None, sharded
        return make_spec(self.mesh, self.placements, sharded.tensor_meta.shape, dtype)


class _Unsharding(NamedTuple):
    """The arguments of `unshard` but the parameter."""

    mesh: Any
    outer: _Outer | None
    placements: tuple[Placement, ...]
    size: tuple[int, ...]
    dtype: torch.dtype | None
    reduction: Reduction
    group: Group
    held: fsdp.HeldGradient = fsdp.HeldGradient()
    place: int = 0

    def move(self, local: torch.Tensor, before: tuple[Placement, ...], after: tuple[Placement, ...]) -> torch.Tensor:
        mesh = real_mesh(self.mesh)
        source, target = (make_spec(mesh, placements, self.size, local.dtype) for placements in (before, after))
        return send_with(redistribute_local(local, source, target), self.group)

    def reduced(self, grad: torch.Tensor, holder: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """The shard of the mean of whole gradients, in the dtype of the parameter; None if it is held."""
        grad, partial = _divide(grad, self.reduction.before), Partial(self.reduction.op)
        placements: tuple[Placement, ...] = (partial,) * len(self.placements)
        if self.held.shard:
            placements, before = (partial, *self.placements[1:]), placements
            grad = self.move(grad, before, placements)
            if self.held.shard == "hold":
                hold_shard(grad, holder, self.place, 0)
                return None
            grad = with_held_shard(grad, holder, self.place, 0)
        grad = self.move(grad, placements, self.placements)
        return _cast(_divide(grad, self.reduction.after), dtype)


class _Unshard(torch.autograd.Function):
    """Below autograd and DTensor: local tensors, and one redistribution each way."""

    @staticmethod
    def forward(ctx: Any, param: DTensor, holder: torch.Tensor | None, how: _Unsharding) -> torch.Tensor:
        local, ctx.spec = local_and_spec(param)
        ctx.holder, ctx.how = holder, how
        whole = how.move(_cast(local, how.dtype), how.placements, (Replicate(),) * len(how.placements))
        whole = whole.view_as(whole) if whole is local else whole
        return whole if how.outer is None else with_local(whole, how.outer.spec(ctx.spec, whole.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        how, reduction = ctx.how, ctx.how.reduction
        placements: tuple[Placement, ...] = ()
        if how.outer is not None:
            assert isinstance(grad, DTensor), type(grad)
            placements = fsdp_gradients.reduced_placements(
                grad.placements, how.outer.placements, how.outer.data_parallel
            )
            grad, _ = local_and_spec(grad.redistribute(placements=placements))
            send_with(grad, how.group)
        if how.held.whole == "hold":
            hold_gradient(grad, ctx.holder, how.place, spec_text(placements), 0)
            return None, None, None
        grad = _cast(grad, reduction.dtype)
        if how.held.whole == "release":
            grad = with_held_gradient(grad, ctx.holder, how.place, 0)
        shard = how.reduced(grad, ctx.holder, ctx.spec.tensor_meta.dtype)
        return None if shard is None else with_local(shard, ctx.spec), None, None


def unshard(  # noqa: PLR0913, PLR0917 - arguments of a call in Dynamo's graph, which are plain constants
    param: DTensor,
    mesh: Any,
    outer: tuple[Any, ...] | None,
    placements: str,
    size: tuple[int, ...],
    dtype: torch.dtype | None,
    reduction: tuple[Any, ...],
    reshard: bool,
    group: str,
    held: tuple[str, str] = ("", ""),
    holder: torch.Tensor | None = None,
    index: int = 0,
) -> torch.Tensor:
    """The tensor that the forward uses in place of a parameter that data-parallel ranks share.

    Args:
        param: sharded over `mesh`, and over other dims where the module is tensor-parallel too.
        mesh: the data-parallel mesh: one dim, or two of which the first replicates.
        outer: an `_Outer`, with its placements as text: the DTensor that comes out; None: a plain tensor comes out.
        placements: text form, on `mesh`.
        size: size of the tensor that the ranks of `mesh` share; the local size if the result is a DTensor.
        dtype: dtype of the result; None keeps that of the parameter.
        reduction: a `Reduction`.
        reshard: whether the backward gathers it again, instead of saving it.
        group: name of the group that is gathered and reduced together.
        held, holder, index: handling of gradients that wait to be reduced (`compat.distributed.fsdp.Sharded`).

    Returns:
        The whole parameter. Its gradient, different on each rank, is reduced to the placements of the parameter, or
        held.
    """
    of = None if outer is None else _Outer(outer[0], parse_spec(outer[1]), tuple(outer[2]))
    how = _Unsharding(
        mesh,
        of,
        parse_spec(placements),
        tuple(size),
        dtype,
        Reduction(*reduction),
        Group(group),
        fsdp.HeldGradient(*held),
        index,
    )
    with recomputed_in_backward(reshard):
        return _Unshard.apply(param, holder, how)


def reduce_held(state: Callable[[], fsdp.FSDPState | None], paths: Collection[tuple[str | int, ...]]) -> None:
    """Reduces held gradients of parameters that a forward did not use, which its backward therefore does not reduce.

    Args:
        state: a weak reference.
        paths: paths of the parameters.
    """
    found = state()
    if found is None:
        return
    for sharded in fsdp.sharded_parameters(found):
        held = _held_for(found, sharded) if sharded.path in paths else None
        if held is not None:
            param, reduction = sharded.parameter, Reduction.of(sharded)
            how = _Unsharding(
                sharded.mesh,
                _Outer.of(sharded),
                sharded.placements,
                sharded.size,
                sharded.dtype,
                reduction,
                Group("held"),
                sharded.held,
                sharded.index,
            )
            assert isinstance(param, DTensor), type(param)
            local, spec = local_and_spec(param)
            shard = how.reduced(_cast(held, reduction.dtype), fsdp_gradients.holder_of(found, sharded), local.dtype)
            if shard is not None:
                grad = with_local(shard, spec)
                param.grad = grad if param.grad is None else param.grad + grad


def _held_for(state: fsdp.FSDPState, sharded: fsdp.Sharded) -> torch.Tensor | None:
    """The held gradient of a parameter: zeros if only its shard is held, which is added on the way; None if neither
    is."""
    held = fsdp_gradients.taken(state, sharded)
    if held is None and sharded.held.shard == "release" and fsdp_gradients.holds_shard(state, sharded):
        return torch.zeros(sharded.size, dtype=sharded.parameter.dtype, device=sharded.parameter.device)
    return held


class _AverageGradient(torch.autograd.Function):
    """DDP divides before it sums; so does this, for the same rounding."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, group: str, ranks: int, together: Group) -> torch.Tensor:
        ctx.group, ctx.ranks, ctx.together = group, ranks, together
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        mean = functional("all_reduce")((grad / ctx.ranks).contiguous(), "sum", ctx.group)
        mark_rank_uniform(send_with(mean, ctx.together))
        return wait_tensor(mean), None, None, None


def average_gradient(param: torch.Tensor, group: str, ranks: int, name: str, limits: tuple[int, ...]) -> torch.Tensor:
    """`param`, whose gradient is the mean over the process group `group`, which has `ranks` ranks.

    Args:
        name, limits: of the `Group` that is reduced together.
    """
    return _AverageGradient.apply(param, group, ranks, Group(name, tuple(limits)))


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)


def _divide(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    return tensor if divisor == 1 else tensor / divisor
