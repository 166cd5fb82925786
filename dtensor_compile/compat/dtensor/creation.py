"""Private names of torch for meshes, process groups and the creation of DTensors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _api, _utils

from dtensor_compile.compat.distributed.device_meshes import group_exists, group_name, is_member, real_mesh

#: Holds the mesh of the innermost ``with mesh:``; thread-local.
MESH_ENV: Any = device_mesh._mesh_resources

#: Computes size and offset of a local tensor from integers, a mesh and placements.
compute_local_shape_and_global_offset = _utils.compute_local_shape_and_global_offset


def world() -> dist.ProcessGroup | None:
    """The default group of this process, None before ``init_process_group`` and after ``destroy_process_group``."""
    return dist.group.WORLD if dist.is_initialized() else None


def group_is_alive(group: dist.ProcessGroup) -> bool:
    """Whether the group was not destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def mesh_is_alive(mesh: DeviceMesh) -> bool:
    """Whether no group of the mesh was destroyed."""
    mesh = real_mesh(mesh)
    return not is_member(mesh) or all(group_exists(group_name(mesh, dim)) for dim in range(len(mesh._dim_group_names)))


def is_in_factory(filename: str) -> bool:
    """Whether `filename` is the file in which torch defines the DTensor factories (``zeros``, ``full``, ``randn``)."""
    return filename == _api.__file__
