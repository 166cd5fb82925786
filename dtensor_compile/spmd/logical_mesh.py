"""`Mesh`: the devices of a job as a grid with named axes, as in torch_xla; conversion to and from torch's
``DeviceMesh``.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.errors import ManualRegionError, MeshError
from dtensor_compile.ir.mesh import groups_in_mesh_order, mesh_in_its_order, mesh_layout, mesh_text
from dtensor_compile.spmd.op_sharding import DeviceShard, OpSharding, device_shards, op_sharding
from dtensor_compile.spmd.partition_spec import Axes, check_rank, spec_axes


class Mesh:
    """A grid of devices. Device ids are global ranks.

    Args:
        device_ids: a permutation of 0..n-1, in row-major order of the grid.
        mesh_shape: size of each axis; the product is n.
        axis_names: a unique name for each axis; without them axes have only indices.

    Raises:
        MeshError: an argument violates these rules, or n is not the number of ranks of the job (if
            ``torch.distributed`` is initialized).
    """

    def __init__(
        self, device_ids: Sequence[int] | np.ndarray, mesh_shape: Sequence[int], axis_names: Sequence[str] | None = None
    ) -> None:
        ids = tuple(int(i) for i in np.asarray(device_ids).flatten())
        self.mesh_shape = tuple(int(size) for size in mesh_shape)
        self.axis_names = tuple(axis_names) if axis_names is not None else None
        self.device_ids = ids
        self._device_mesh: DeviceMesh | None = None
        self.text = ""  # of the torch mesh (ir/mesh.py); empty until it exists
        _check(ids, self.mesh_shape, self.axis_names)
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else len(ids)
        if len(ids) != world:
            raise MeshError(f"the mesh has {len(ids)} devices, the job has {world} ranks: a mesh must cover all ranks")

    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh_shape)

    def shape(self) -> collections.OrderedDict[Any, int]:
        """Size of each axis by its name (by its index if the mesh has no names), in order."""
        return collections.OrderedDict(zip(self.axis_names or range(len(self.mesh_shape)), self.mesh_shape))

    def get_logical_mesh(self) -> np.ndarray:
        """Device ids in the shape of the mesh."""
        return np.array(self.device_ids).reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """Index of the axis with that name; None if there is none."""
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    def axes(self, spec: Any, tensor_ndim: int | None = None) -> Axes:
        """The axes of a partition spec as indices, per tensor dim; raises `PlacementError` if the spec is invalid."""
        axes = spec_axes(spec, self.mesh_shape, self.axis_names)
        if tensor_ndim is not None:
            check_rank(spec, tensor_ndim)
        return axes

    def op_sharding(self, spec: Any) -> OpSharding:
        """The device-by-device sharding of a partition spec on this mesh."""
        return op_sharding(self.get_logical_mesh(), self.axes(spec))

    def device_shards(self, spec: Any, shape: Sequence[int]) -> list[DeviceShard]:
        """The shard of each device, for a tensor of that shape."""
        return device_shards(self.get_logical_mesh(), self.axes(spec, len(shape)), shape)

    def to_device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """torch's mesh of the same devices, created once. All ranks have to call it, as it creates process groups.

        If ranks do not ascend along an axis, its process groups have the order of the mesh
        (`ir.mesh.mesh_in_its_order`).
        """
        if self._device_mesh is None:
            names = self.axis_names or tuple(f"axis{i}" for i in range(len(self.mesh_shape)))
            grid = torch.tensor(self.get_logical_mesh())
            ascending = all(bool((grid.diff(dim=axis) > 0).all()) for axis in range(grid.ndim))
            kind = device_type or ("cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend() else "cpu")
            self._take(
                DeviceMesh(kind, grid, mesh_dim_names=names) if ascending else mesh_in_its_order(kind, grid, names)
            )
        assert self._device_mesh is not None
        return self._device_mesh

    def _take(self, mesh: DeviceMesh) -> None:
        self._device_mesh, self.text = mesh, mesh_text(mesh)
        _device_meshes[self.text] = mesh

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> Mesh:
        """The same grid as a torch mesh. `to_device_mesh` returns that mesh, unless its process groups have another
        order.

        Raises:
            MeshError: the mesh does not cover all ranks of the job.
        """
        layout = mesh_layout(mesh)
        this = cls(mesh.mesh.flatten().tolist(), layout.shape, mesh.mesh_dim_names)
        if groups_in_mesh_order(mesh, layout):
            this._take(mesh)
        return this

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.device_ids, self.mesh_shape, self.axis_names

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={size}" for name, size in self.shape().items())
        return f"Mesh({dims})"


def _check(ids: Sequence[int], shape: Sequence[int], names: Sequence[str] | None) -> None:
    if any(size < 1 for size in shape):
        raise MeshError(f"mesh shape {tuple(shape)}: sizes must be at least 1")
    if math.prod(shape) != len(ids):
        raise MeshError(
            f"{len(ids)} device ids do not fill a mesh of shape {tuple(shape)}, which has {math.prod(shape)} places"
        )
    if len(set(ids)) != len(ids):
        twice = sorted({i for i in ids if ids.count(i) > 1})
        raise MeshError(f"device ids have to be unique: {twice} are duplicated")
    if any(not 0 <= i < len(ids) for i in ids):
        raise MeshError(
            f"device ids have to be 0..{len(ids) - 1}: {sorted(i for i in ids if not 0 <= i < len(ids))} are not"
        )
    if names is None:
        return
    if len(names) != len(shape):
        raise MeshError(f"{len(names)} axis names {tuple(names)} do not fit a mesh of {len(shape)} axes")
    if len(set(names)) != len(names):
        raise MeshError(f"axis names have to be unique: {tuple(names)}")


# Compiled programs refer to meshes by their text; equal meshes are interchangeable, and the newest has process groups.
_device_meshes: dict[str, DeviceMesh] = {}


def device_mesh_of(text: str) -> DeviceMesh:
    """The torch mesh with that text.

    Raises:
        MeshError: no `Mesh` of this process has it.
    """
    if text not in _device_meshes:
        raise MeshError(f"no Mesh of this process is {text}: create it, and its torch mesh (to_device_mesh)")
    return _device_meshes[text]


def axis_name(mesh: DeviceMesh, dim: int) -> str:
    """Name of a dim of a mesh, for messages."""
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else str(dim)


def sub_mesh(mesh: DeviceMesh, dims: Sequence[int]) -> DeviceMesh:
    """The slice of a mesh with these dims; the mesh itself if those are all."""
    if len(dims) == mesh.ndim:
        return mesh
    names = mesh.mesh_dim_names
    assert names is not None  # meshes of `Mesh` have names
    return mesh[tuple(names[i] for i in dims)]


def dims_in(mesh: DeviceMesh, part: DeviceMesh) -> list[int]:
    """The dims of a mesh that a slice of it has.

    Raises:
        ManualRegionError: `part` is not a slice of that mesh.
    """
    names, of_part = mesh.mesh_dim_names or (), part.mesh_dim_names or ()
    if not set(of_part) <= set(names):
        raise ManualRegionError(f"a tensor over {mesh_text(part)} cannot be in a manual region over {mesh_text(mesh)}")
    return [names.index(name) for name in of_part]


class _Global:
    """Holds the mesh of `set_global_mesh`."""

    mesh: Mesh | None = None


def set_global_mesh(mesh: Mesh | None) -> None:
    """Sets the default mesh of the functions of this package."""
    _Global.mesh = mesh


def get_global_mesh() -> Mesh | None:
    """The mesh of `set_global_mesh`; None if there is none."""
    return _Global.mesh


def get_1d_mesh(axis_name: str | None = None, size: int | None = None) -> Mesh:
    """A mesh of all ranks of the job along one axis. `size` is for programs without a process group.

    Raises:
        MeshError: there is neither a process group nor a size.
    """
    if size is None and not (dist.is_available() and dist.is_initialized()):
        raise MeshError("get_1d_mesh needs the number of ranks: call torch.distributed.init_process_group() first")
    n = dist.get_world_size() if size is None else size
    return Mesh(range(n), (n,), (axis_name,) if axis_name else None)
