"""Sizes and offsets of shards while tracing: computed from (symbolic) integers, the same way on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import guard_or_false

from dtensor_compile.compat.dtensor.specs import spec_of_parts
from dtensor_compile.compat.patches import if_there


def local_shape_and_offset(
    stock: Callable[..., Any],
    global_shape: Sequence[Any],
    mesh_shape: Sequence[int],
    my_coordinate: Any,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Sizes and offsets of the local shard, in integers: shards of one dim nest left to right, so their offsets add up.

    An empty shard begins where the tensor ends. Strided shards are left to torch.
    """
    if skip_offset or my_coordinate is None or any(isinstance(p, _StridedShard) for p in placements):
        return stock(global_shape, mesh_shape, my_coordinate, placements, skip_offset)
    sizes, offsets = list(global_shape), [0] * len(global_shape)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            rank = my_coordinate(mesh_dim) if callable(my_coordinate) else my_coordinate[mesh_dim]
            size, offset = Shard.local_shard_size_and_offset(sizes[placement.dim], mesh_shape[mesh_dim], rank)
            sizes[placement.dim] = size
            empty = isinstance(size, int) and size == 0
            offsets[placement.dim] = global_shape[placement.dim] if empty else offsets[placement.dim] + offset
    return tuple(sizes), tuple(offsets)


#: Selects the offsets of a strided shard to return; before 2.13 it was all of them or the first.
_OFFSETS: Any = if_there("torch.distributed.tensor.placement_types:_StridedShardOffsetMode")


def strided_shard_size(stock: Callable[..., Any], self: _StridedShard, size: Any, *args: Any, **kwargs: Any) -> Any:
    """Size and offset of a strided shard. torch reads the offset out of a tensor, which needs values while tracing.

    For an integer size, torch runs outside of the fake mode. For a symbolic size, the first offset, which torch asks
    for by default and mostly drops, is computed if the shards are even, and None otherwise.
    """
    if isinstance(size, int):
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            return stock(self, size, *args, **kwargs)
    if len(args) != 2 or kwargs or _OFFSETS is None:
        return stock(self, size, *args, **kwargs)
    chunks, rank = args
    pieces = self.split_factor * chunks
    if guard_or_false(size % pieces == 0):
        return size // chunks, rank * (size // pieces)
    return stock(self, size, chunks, rank, _OFFSETS.NONE)


def fix_flattened_sizes(
    stock: Callable[..., Any],
    self: Any,
    p: Shard,
    mesh_dim: int,
    placements: Any,
    claimed: Any,
    local_shapes: list[Any],
    *rest: Any,
) -> Any:
    """Specializes sizes before a sharded dim that is flattened with them: they are the split factor of the result."""
    for dim in self.rule:
        flat = (
            [d.input_dim for d in dim.input_dims if isinstance(d, _view_ops.InputDim)]
            if isinstance(dim, _view_ops.Flatten)
            else []
        )
        if p.dim in flat[1:]:
            for before in range(flat[0], p.dim):
                local_shapes[before] = int(local_shapes[before])
    return stock(self, p, mesh_dim, placements, claimed, local_shapes, *rest)


def unflatten(
    stock: Callable[..., DTensor], inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
) -> DTensor:
    """Rebuilds a DTensor with strided shards from its parts.

    Views give such specs a shard order as well, which torch refuses here.
    """
    placements, meta, order, requires_grad = flatten_spec
    if order is None or not any(isinstance(p, _StridedShard) for p in placements):
        return stock(inner_tensors, flatten_spec, outer_size, outer_stride)
    spec = spec_of_parts(placements, meta.dtype, order, inner_tensors["device_mesh"], outer_size, outer_stride)
    return DTensor(inner_tensors["_local_tensor"], spec, requires_grad=requires_grad)
