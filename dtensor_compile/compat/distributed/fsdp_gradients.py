"""Gradients under ``fully_shard`` that wait for a later backward pass to reduce them, where eager keeps them: eager and
compiled microbatches mix.

A *holder* is a tensor with a number, by which compiled code finds the group whose gradients wait. They wait as they
come (`hold`, `release`), or reduced over shards and not yet over replicas (`hold_shard`, `release_shard`).
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Sequence

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Placement

from dtensor_compile.compat.distributed.fsdp import HOLDER, Sharded, data_parallel_dims, groups_of, unsharded_spec
from dtensor_compile.compat.dtensor.specs import with_local

#: Groups by the number in their holder.
_HOLDERS: weakref.WeakValueDictionary[int, FSDPParamGroup] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def make_holders(state: FSDPState) -> None:
    """Gives each group a tensor with a number, by which compiled code finds it when it runs."""
    for group in groups_of(state):
        if not hasattr(group, HOLDER):
            number = next(_NUMBERS)
            _HOLDERS[number] = group
            setattr(group, HOLDER, torch.tensor(number))


def hold(number: int, index: int, grad: torch.Tensor, placements: tuple[Placement, ...]) -> None:
    """Adds the gradient of a whole parameter to what waits to be reduced, where eager's next backward finds it too.

    Args:
        number, index: of the group and of the parameter.
        grad: of the local tensor; copied.
        placements: of the gradient, where the parameter is a DTensor. Over data-parallel dims of its mesh it may be
            partial.
    """
    group = _HOLDERS[number]
    param = group.fsdp_params[index]
    before = _taken(param)
    # A root whose hooks run in eager ends the backward pass of each group that has not had one; this one has it here.
    if group.modules[0]._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
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
    """A new, contiguous tensor: `grad` and what is held of the same parameter, which is held no longer."""
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
    """What is held of a parameter, as a local tensor; it is held no longer."""
    return _taken(_place_of(state, sharded)[1])


def holder_of(state: FSDPState, sharded: Sharded) -> torch.Tensor:
    """The tensor with the number of the group that has a parameter."""
    return getattr(_place_of(state, sharded)[0], HOLDER)


def _taken(param: FSDPParam) -> torch.Tensor | None:
    """What is held of a parameter, as a local tensor; it is held no longer.

    In eager it is the gradient of the whole parameter, or, where reductions have another dtype, a tensor of that.
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
    """Placements of a gradient before the wrapper reduces it: those of the parameter, but over data-parallel dims its
    own.
    """
    return tuple(
        of if dim in data_parallel else placement
        for dim, (of, placement) in enumerate(zip(grad, parameter, strict=True))
    )


#: The attribute of a flat tensor of held shards with the indices of those that are in it; eager's has none, and all.
_INDICES = "_dtensor_compile_indices"


def _held_shards(group: FSDPParamGroup) -> set[int]:
    """Indices of the parameters whose shards wait; eager holds those of all that require gradients."""
    flat = group._partial_reduce_output
    if not hasattr(flat, _INDICES):
        setattr(flat, _INDICES, {i for i, param in enumerate(group.fsdp_params) if param.sharded_param.requires_grad})
    return getattr(flat, _INDICES)


def _held_shard(group: FSDPParamGroup, index: int) -> torch.Tensor:
    """The place of a shard in the flat tensor in which eager keeps those of a group: one after the other, each
    padded.
    """
    params = group.fsdp_params
    offset = sum(
        param.padded_sharded_param_size.numel() for param in params[:index] if param.sharded_param.requires_grad
    )
    of = params[index]
    return group._partial_reduce_output.as_strided(of.sharded_size, of.contiguous_sharded_stride, offset)


def hold_shard(number: int, index: int, grad: torch.Tensor) -> None:
    """Adds a gradient that is reduced over shards to what waits to be reduced over replicas, where eager's next
    backward finds it too.

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
    """A new, contiguous tensor: `grad`, reduced over shards, and what is held of the same parameter, which is held no
    longer.
    """
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
