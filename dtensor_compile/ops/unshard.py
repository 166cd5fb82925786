"""The semantics of data-parallel wrappers, as functions of a graph.

A wrapper defines the tensor that the forward uses in place of a parameter, and the reduction of its gradient. Both are
one function of the parameter here, with the second as the gradient of the first:

    unshard(params, ...)          sharded DTensors -> whole tensors;  gradient: mean over the ranks, as sharded
                                                                      DTensors, or none: it is held until a later pass
                                                                      reduces it, whole, or its shard, which waits for
                                                                      replicas
    average_gradient(param, ...)  the parameter itself;               gradient: mean over the ranks

AOTAutograd traces them into the joint graph as casts, ``dtensor_compile::redistribute`` nodes and divisions, so that
communication of wrappers is planned with everything else. The parameters of one call of a wrapped module are one call
here, since tracing costs for each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
    redistribute_locals,
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
    """What `unshard` does with one parameter.

    Attributes:
        mesh, outer, placements, size, dtype, reduction, held, place: see `unshard`.
        group: of collectives that are sent together.
        holder: the tensor with the number of the group whose gradients are held; None if they are not.
    """

    mesh: Any
    outer: _Outer | None
    placements: tuple[Placement, ...]
    size: tuple[int, ...]
    dtype: torch.dtype | None
    reduction: Reduction
    held: fsdp.HeldGradient
    place: int
    group: Group
    holder: torch.Tensor | None = None

    @property
    def replicated(self) -> tuple[Placement, ...]:
        return (Replicate(),) * len(self.placements)

    def arrived(self, grad: torch.Tensor) -> torch.Tensor | None:
        """What is to be reduced of the gradient of the whole parameter, a local tensor; None if it is held."""
        placements: tuple[Placement, ...] = ()
        if self.outer is not None:
            assert isinstance(grad, DTensor), type(grad)
            placements = fsdp_gradients.reduced_placements(
                grad.placements, self.outer.placements, self.outer.data_parallel
            )
            if placements != grad.placements:
                grad = grad.redistribute(placements=placements)
            grad, _ = local_and_spec(grad)
            send_with(grad, self.group)
        if self.held.whole == "hold":
            hold_gradient(grad, self.holder, self.place, spec_text(placements), 0)
            return None
        grad = _cast(grad, self.reduction.dtype)
        return with_held_gradient(grad, self.holder, self.place, 0) if self.held.whole == "release" else grad

    def to_shard(self, grad: torch.Tensor) -> tuple[torch.Tensor, tuple[Placement, ...]] | None:
        """The tensor that remains to be redistributed to the placements of the parameter, and its own; None if it is
        held."""
        grad, partial = _divide(grad, self.reduction.before), Partial(self.reduction.op)
        placements: tuple[Placement, ...] = (partial,) * len(self.placements)
        if not self.held.shard:
            return grad, placements
        placements, before = (partial, *self.placements[1:]), placements
        (grad,) = _move([self], [grad], [before], [placements])
        if self.held.shard == "hold":
            hold_shard(grad, self.holder, self.place, 0)
            return None
        return with_held_shard(grad, self.holder, self.place, 0), placements


def _move(
    hows: Sequence[_Unsharding],
    locals_: Sequence[torch.Tensor],
    before: Sequence[tuple[Placement, ...]],
    after: Sequence[tuple[Placement, ...]],
) -> list[torch.Tensor]:
    """Local tensors in other placements on the meshes of their parameters."""
    specs = [
        [make_spec(real_mesh(how.mesh), placements, how.size, local.dtype) for placements in (source, target)]
        for how, local, source, target in zip(hows, locals_, before, after, strict=True)
    ]
    moved = redistribute_locals(locals_, [source for source, _ in specs], [target for _, target in specs])
    return [send_with(tensor, how.group) for how, tensor in zip(hows, moved, strict=True)]


def _reduce(
    hows: Sequence[_Unsharding], grads: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor | None]:
    """The shards of the means of whole gradients, in the dtypes of the parameters; None for one that is held."""
    shards: list[torch.Tensor | None] = [None] * len(hows)
    found = [(i, left) for i, how in enumerate(hows) if (left := how.to_shard(grads[i])) is not None]
    moving = [hows[i] for i, _ in found]
    moved = _move(
        moving,
        [grad for _, (grad, _) in found],
        [placements for _, (_, placements) in found],
        [how.placements for how in moving],
    )
    for (i, _), shard in zip(found, moved, strict=True):
        shards[i] = _cast(_divide(shard, hows[i].reduction.after), dtypes[i])
    return shards


class _Unshard(torch.autograd.Function):
    """Below autograd and DTensor: local tensors, and one redistribution of each parameter each way."""

    @staticmethod
    def forward(ctx: Any, hows: Sequence[_Unsharding], *params: DTensor) -> tuple[torch.Tensor, ...]:
        found = [local_and_spec(param) for param in params]
        ctx.specs, ctx.hows = [spec for _, spec in found], hows
        ctx.set_materialize_grads(False)
        locals_ = [_cast(local, how.dtype) for (local, _), how in zip(found, hows, strict=True)]
        moved = _move(hows, locals_, [how.placements for how in hows], [how.replicated for how in hows])
        results = []
        for how, (local, spec), whole in zip(hows, found, moved, strict=True):
            whole = whole.view_as(whole) if whole is local else whole
            results.append(whole if how.outer is None else with_local(whole, how.outer.spec(spec, whole.dtype)))
        frozen = [whole for whole, needed in zip(results, ctx.needs_input_grad[1:], strict=True) if not needed]
        ctx.mark_non_differentiable(*frozen)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = []
        for i, (how, grad, needed) in enumerate(zip(ctx.hows, grads, ctx.needs_input_grad[1:], strict=True)):
            if grad is not None and needed and (arrived := how.arrived(grad)) is not None:
                found.append((i, arrived))
        dtypes = [ctx.specs[i].tensor_meta.dtype for i, _ in found]
        shards = _reduce([ctx.hows[i] for i, _ in found], [grad for _, grad in found], dtypes)
        results: list[torch.Tensor | None] = [None] * len(grads)
        for (i, _), shard in zip(found, shards, strict=True):
            results[i] = None if shard is None else with_local(shard, ctx.specs[i])
        return None, *results


def unshard(
    params: Sequence[DTensor],
    sharded: Sequence[tuple[Any, ...]],
    reshard: bool,
    group: str,
    holders: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """The tensors that the forward uses in place of parameters that data-parallel ranks share.

    Args:
        params: sharded over the mesh, and over other dims where the module is tensor-parallel too.
        sharded: of each parameter, as plain constants:

            - the data-parallel mesh: one dim, or two of which the first replicates;
            - an `_Outer`, with its placements as text: the DTensor that comes out; None: a plain tensor comes out;
            - placements on the mesh, as text;
            - size of the tensor that the ranks of the mesh share; the local size if the result is a DTensor;
            - dtype of the result; None keeps that of the parameter;
            - a `Reduction`;
            - handling of gradients that wait to be reduced, and the number of the parameter in its group
              (`compat.distributed.fsdp.Sharded`).
        reshard: whether the backward gathers them again, instead of saving them.
        group: name of the group that is gathered and reduced together.
        holders: of gradients that wait to be reduced, one for each parameter; none if no gradient does.

    Returns:
        The whole parameters. Their gradients, different on each rank, are reduced to the placements of the parameters,
        or held. A parameter without a gradient keeps none.
    """
    hows = [
        _Unsharding(
            mesh,
            None if outer is None else _Outer(outer[0], parse_spec(outer[1]), tuple(outer[2])),
            parse_spec(placements),
            tuple(size),
            dtype,
            Reduction(*reduction),
            fsdp.HeldGradient(*held),
            index,
            Group(group),
            holders[i] if holders else None,
        )
        for i, (mesh, outer, placements, size, dtype, reduction, held, index) in enumerate(sharded)
    ]
    with recomputed_in_backward(reshard):
        return _Unshard.apply(hows, *params)


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
                sharded.held,
                sharded.index,
                Group("held"),
                fsdp_gradients.holder_of(found, sharded),
            )
            assert isinstance(param, DTensor), type(param)
            local, spec = local_and_spec(param)
            (shard,) = _reduce([how], [_cast(held, reduction.dtype)], [local.dtype])
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
