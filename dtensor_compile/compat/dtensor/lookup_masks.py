"""Masks of row-wise sharded lookups in rank-free graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _MaskPartial

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.distributed.device_meshes import real_mesh
from dtensor_compile.compat.patches import hook, needs, patch

_PARTITION = patch(
    "torch.distributed.tensor.placement_types:_MaskPartial._partition_value", "self tensor mesh mesh_dim"
)


@needs(
    "rank-free masks of row-wise lookups",
    _PARTITION,
    hook(
        "torch.distributed.tensor.placement_types:_MaskPartial._mask_tensor",
        "tensor local_offset_on_dim local_shard_size",
    ),
    without="a graph with such a lookup is compiled for each coordinate",
    upstream="not reported: torch's own compile_on_one_rank makes the offset symbolic, which Inductor then guards on",
    remove_when="_MaskPartial takes the offset of this rank as a tensor",
)
@contextlib.contextmanager
def masks_at_run_time(coordinate: Callable[[DeviceMesh, int, torch.device], torch.Tensor]) -> Iterator[None]:
    """While active, the mask of a lookup in even shards is computed from a tensor with the coordinate of this rank.

    Args:
        coordinate: to a mesh, a mesh dim and a device, the coordinate, int64 without dims.
    """

    def partition(stock: Any, self: _MaskPartial, x: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        n, rows = mesh.size(mesh_dim), self.offset_shape[self.offset_dim] if self.offset_shape is not None else 0
        if not isinstance(rows, int) or rows == 0 or rows % n:
            return stock(self, x, mesh, mesh_dim)  # type: ignore[no-any-return]
        offset: Any = coordinate(real_mesh(mesh), mesh_dim, x.device) * (rows // n)
        mask, masked = _MaskPartial._mask_tensor(x, offset, rows // n)
        self.mask_buffer.materialize_mask(mask)
        return masked

    with patched(_PARTITION, partition):
        yield
