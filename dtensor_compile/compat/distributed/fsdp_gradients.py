"""Unreduced gradients under ``fully_shard`` that wait for a later backward pass, kept where eager keeps them, so that
eager and compiled microbatches mix.

A *holder* is a tensor with a number, by which compiled code finds a group. Gradients wait either as they arrive
(`hold`, `release`), or reduced over shards but not yet over replicas (`hold_shard`, `release_shard`).
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Placement

from dtensor_compile.compat.distributed.fsdp import (
    HOLDER,
    Sharded,
    data_parallel_dims,
    groups_of,
    reduction_dtype,
    unsharded_spec,
)
from dtensor_compile.compat.dtensor.specs import with_local

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

#: Groups by the number in their holder.
_HOLDERS: weakref.WeakValueDictionary[int, FSDPParamGroup] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()

#: Whether eager keeps held gradients as those of the unsharded parameter, as of 2.15; before, also in an attribute.
HELD_IN_PARAMETER = isinstance(inspect.getattr_static(FSDPParam, "unsharded_accumulated_grad", None), property)


def make_holders(state: FSDPState) -> None:
    """Gives each group a tensor with a number, by which compiled code finds the group at run time."""
    for group in groups_of(state):
        if not hasattr(group, HOLDER):
            number = next(_NUMBERS)
            _HOLDERS[number] = group
            setattr(group, HOLDER, torch.tensor(number))


def add_to_held(number: int, index: int, grad: torch.Tensor, placements: tuple[Placement, ...]) -> None:
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
        before = grad.detach().to(reduction_dtype(param) or grad.dtype, copy=True)
    else:
        before.add_(grad)
    spec = unsharded_spec(param)
    _keep(
        group, param, before if spec is None else with_local(before, dataclasses.replace(spec, placements=placements))
    )


def _keep(group: FSDPParamGroup, param: FSDPParam, grad: torch.Tensor) -> None:
    if not HELD_IN_PARAMETER:
        param.unsharded_accumulated_grad = grad
        return
    if not hasattr(param, "_unsharded_param"):  # as eager makes it in its first forward, without memory after it
        ranks = group._all_gather_process_group.size() if isinstance(group.mesh_info, FSDPMeshInfo) else 1
        numel, dtype = param._sharded_param_data.numel(), param.param_dtype or param.orig_dtype
        param.init_all_gather_outputs([numel], [dtype], ranks, group.device)
        param.init_unsharded_param()
        param.free_unsharded_param()
    param._unsharded_param.grad = grad


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


def holds_shard(state: FSDPState, sharded: Sharded) -> bool:
    """Whether the shard of a parameter is held, and eager reduces it with the next ones even if they do not use the
    parameter, as of 2.15."""
    group = _place_of(state, sharded)[0]
    return hasattr(group, _LAYOUT) and group._partial_reduce_output is not None and sharded.index in _held_shards(group)


def holder_of(state: FSDPState, sharded: Sharded) -> torch.Tensor:
    """The tensor with the number of the group of a parameter."""
    return getattr(_place_of(state, sharded)[0], HOLDER)


def _taken(param: FSDPParam) -> torch.Tensor | None:
    """The held gradient of a parameter, as a local tensor; clears it.

    Eager keeps it as the gradient of the unsharded parameter or, if reductions have another dtype, in a tensor of that.
    """
    held = None
    if not HELD_IN_PARAMETER:
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


#: Attribute of a flat tensor of held shards with the indices of those in it; eager's lacks it.
_INDICES = "_dtensor_compile_indices"
#: Attribute of a group with the offsets and padded sizes of shards in that tensor, as of 2.15; before, all are in it.
_LAYOUT = "_partial_reduce_output_layout"


def _places(group: FSDPParamGroup) -> dict[int, int]:
    """Offsets of shards in the flat tensor of held shards, by index of the parameter: one after the other, each padded,
    and at the end the length of the tensor, by the number of parameters."""
    params, offset, places = group.fsdp_params, 0, {}
    for i, param in enumerate(params):
        if param.sharded_param.requires_grad:
            places[i] = offset
            offset += param.padded_sharded_param_size.numel()
    return {**places, len(params): offset}


def _held_shards(group: FSDPParamGroup) -> set[int]:
    """Indices of the parameters whose shards are held."""
    flat, places = group._partial_reduce_output, _places(group)
    assert flat is not None
    if hasattr(flat, _INDICES):
        return getattr(flat, _INDICES)
    held = places.keys() - {len(group.fsdp_params)}
    layout = getattr(group, _LAYOUT, None)
    if layout is not None:  # eager's tensor has only shards that got gradients, in an order of its own
        offsets = {i: layout[param][0] for i, param in enumerate(group.fsdp_params) if param in layout}
        if {**offsets, len(group.fsdp_params): flat.numel()} != places:
            group._partial_reduce_output = flat.new_zeros(places[len(group.fsdp_params)])
            for i, offset in offsets.items():
                _shard_at(group, i, places[i]).copy_(_shard_at(group, i, offset, flat))
        held = set(offsets)
    setattr(group._partial_reduce_output, _INDICES, held)
    return held


def _shard_at(group: FSDPParamGroup, index: int, offset: int, flat: torch.Tensor | None = None) -> torch.Tensor:
    """The view of one shard in a flat tensor of shards: that of held shards, if none is given."""
    of, flat = group.fsdp_params[index], group._partial_reduce_output if flat is None else flat
    assert flat is not None
    return flat.as_strided(of.sharded_size, of.contiguous_sharded_stride, offset)


def _note_in_eager(group: FSDPParamGroup, held: set[int]) -> None:
    """Notes in torch's eager state which shards are held, as of 2.15, with sizes that make it pack them anew."""
    if hasattr(group, _LAYOUT):
        places = _places(group)
        setattr(group, _LAYOUT, {group.fsdp_params[i]: (places[i], 0) for i in sorted(held)})


def hold_shard(number: int, index: int, grad: torch.Tensor) -> None:
    """Adds a gradient, reduced over shards, to the held shard that waits to be reduced over replicas; eager's next
    backward finds it, too.

    Args:
        number, index: of the group and of the parameter.
        grad: the local shard.
    """
    group = _HOLDERS[number]
    places = _places(group)
    if group._partial_reduce_output is None:
        group._partial_reduce_output = grad.new_zeros(places[len(group.fsdp_params)])
        setattr(group._partial_reduce_output, _INDICES, set())
    held = _held_shards(group)
    _shard_at(group, index, places[index]).add_(grad)
    held.add(index)
    _note_in_eager(group, held)


def release_shard(number: int, index: int, grad: torch.Tensor) -> torch.Tensor:
    """A new, contiguous tensor: `grad`, reduced over shards, plus the held shard of the same parameter, which is
    cleared."""
    group = _HOLDERS[number]
    if group._partial_reduce_output is None:
        return grad.clone(memory_format=torch.contiguous_format)
    held = _held_shards(group)
    place = _shard_at(group, index, _places(group)[index])
    result = (grad + place).contiguous()
    place.zero_()
    held.discard(index)
    if not held:
        group._partial_reduce_output = None
    _note_in_eager(group, held)
    return result
