"""Unreduced gradients under ``fully_shard`` that wait for a later backward pass, kept where eager keeps them, so that
eager and compiled microbatches mix.

A *holder* is a tensor with a number, by which compiled code finds a group. Gradients wait either as they arrive
(`hold`, `release`), or reduced over shards but not yet over replicas (`hold_shard`, `release_shard`).
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Placement

from dtensor_compile.compat.distributed.fsdp import HOLDER, Sharded, data_parallel_dims, groups_of, unsharded_spec
from dtensor_compile.compat.dtensor.specs import with_local

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

#: Groups by the number in their holder.
_HOLDERS: weakref.WeakValueDictionary[int, FSDPParamGroup] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def make_holders(state: FSDPState) -> None:
    """Gives each group a tensor with a number, by which compiled code finds the group at run time."""
    for group in groups_of(state):
        if not hasattr(group, HOLDER):
            number = next(_NUMBERS)
            _HOLDERS[number] = group
            setattr(group, HOLDER, torch.tensor(number))


def hold(number: int, index: int, grad: torch.Tensor, placements: tuple[Placement, ...]) -> None:
    """Adds the gradient of an unsharded parameter to its held gradient, where eager's next backward finds it, too.

    Args:
        number, index: of the group and of the parameter.
        grad: of the local tensor; copied.
        placements: of the gradient, if the parameter is a DTensor. It may be partial over data-parallel dims of the
            mesh.
    """
    group = _HOLDERS[number]
    param = group.fsdp_params[index]
    before = _taken(param)
    # A root with eager hooks ends the backward pass of each group that has not ended it; this group ends it here.
    if cast("FSDPModule", group.modules[0])._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
        group._training_state = TrainingState.POST_BACKWARD
    if before is None:
        before = grad.detach().to(param.reduce_dtype or grad.dtype, copy=True)
    else:
        before.add_(grad)
    spec = unsharded_spec(param)
    param.unsharded_accumulated_grad = (
        before if spec is None else with_local(before, dataclasses.replace(spec, placements=placements))
    )


def release(number: int, index: int, grad: torch.Tensor) -> torch.Tensor:
    """A new, contiguous tensor: `grad` plus the held gradient of the same parameter, which is cleared."""
    before = _taken(_HOLDERS[number].fsdp_params[index])
    if before is None:
        return grad.clone(memory_format=torch.contiguous_format)
    return before.add_(grad).to(grad.dtype).contiguous()


def _place_of(state: FSDPState, sharded: Sharded) -> tuple[FSDPParamGroup, FSDPParam]:
    return next(
        (group, param)
        for group in groups_of(state)
        for param in group.fsdp_params
        if param.sharded_param is sharded.parameter
    )


def taken(state: FSDPState, sharded: Sharded) -> torch.Tensor | None:
    """The held gradient of a parameter, as a local tensor; clears it."""
    return _taken(_place_of(state, sharded)[1])


def holder_of(state: FSDPState, sharded: Sharded) -> torch.Tensor:
    """The tensor with the number of the group of a parameter."""
    return getattr(_place_of(state, sharded)[0], HOLDER)


def _taken(param: FSDPParam) -> torch.Tensor | None:
    """The held gradient of a parameter, as a local tensor; clears it.

    Eager keeps it as the gradient of the unsharded parameter or, if reductions have another dtype, in a tensor of that.
    """
    held, param.unsharded_accumulated_grad = param.unsharded_accumulated_grad, None
    whole = getattr(param, "_unsharded_param", None)
    if held is None and whole is not None:
        held, whole.grad = whole.grad, None
    if held is not None and (spec := unsharded_spec(param)) is not None:
        assert isinstance(held, DTensor)
        return held.redistribute(
            placements=reduced_placements(held.placements, spec.placements, data_parallel_dims(param))
        ).to_local()
    return held


def reduced_placements(
    grad: Sequence[Placement], parameter: Sequence[Placement], data_parallel: Sequence[int]
) -> tuple[Placement, ...]:
    """Placements of a gradient before the wrapper reduces it: the gradient's own over data-parallel dims, else those of
    the parameter."""
    return tuple(
        of if dim in data_parallel else placement
        for dim, (of, placement) in enumerate(zip(grad, parameter, strict=True))
    )


#: Attribute of a flat tensor of held shards with the indices of those in it; eager's lacks it and contains all.
_INDICES = "_dtensor_compile_indices"


def _held_shards(group: FSDPParamGroup) -> set[int]:
    """Indices of the parameters whose shards are held; eager holds all that require gradients."""
    flat = group._partial_reduce_output
    if not hasattr(flat, _INDICES):
        setattr(flat, _INDICES, {i for i, param in enumerate(group.fsdp_params) if param.sharded_param.requires_grad})
    return getattr(flat, _INDICES)


def _held_shard(group: FSDPParamGroup, index: int) -> torch.Tensor:
    """The view of one shard in eager's flat tensor of held shards of a group: one after the other, each padded."""
    params = group.fsdp_params
    offset = sum(
        param.padded_sharded_param_size.numel() for param in params[:index] if param.sharded_param.requires_grad
    )
    of = params[index]
    assert group._partial_reduce_output is not None
    return group._partial_reduce_output.as_strided(of.sharded_size, of.contiguous_sharded_stride, offset)


def hold_shard(number: int, index: int, grad: torch.Tensor) -> None:
    """Adds a gradient, reduced over shards, to the held shard that waits to be reduced over replicas; eager's next
    backward finds it, too.

    Args:
        number, index: of the group and of the parameter.
        grad: the local shard.
    """
    group = _HOLDERS[number]
    if group._partial_reduce_output is None:
        sizes = (
            param.padded_sharded_param_size.numel() for param in group.fsdp_params if param.sharded_param.requires_grad
        )
        group._partial_reduce_output = grad.new_zeros(sum(sizes))
        setattr(group._partial_reduce_output, _INDICES, set())
    _held_shard(group, index).add_(grad)
    _held_shards(group).add(index)


def release_shard(number: int, index: int, grad: torch.Tensor) -> torch.Tensor:
    """A new, contiguous tensor: `grad`, reduced over shards, plus the held shard of the same parameter, which is
    cleared."""
    group = _HOLDERS[number]
    if group._partial_reduce_output is None:
        return grad.clone(memory_format=torch.contiguous_format)
    indices, place = _held_shards(group), _held_shard(group, index)
    result = (grad + place).contiguous()
    place.zero_()
    indices.discard(index)
    if not indices:
        group._partial_reduce_output = None
    return result
