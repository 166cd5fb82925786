"""Operators that read the coordinate of this rank in a mesh when they run: rank-free graphs call them
(`ir/rank_free.py`).

    mesh_coordinate(str mesh, int mesh_dim, Device device) -> Tensor            the coordinate, int64 without dims
    shard_of(Tensor x, int dim, str mesh, int mesh_dim) -> Tensor               this rank's chunk of an even dim, copied
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.compat.distributed.device_meshes import my_rank
from dtensor_compile.errors import NoProcessGroupError
from dtensor_compile.ir.mesh import mesh_text, parse_mesh

_library = torch.library.Library("dtensor_compile", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define("mesh_coordinate(str mesh, int mesh_dim, Device device) -> Tensor", tags=_TAGS)
_library.define("shard_of(Tensor x, int dim, str mesh, int mesh_dim) -> Tensor", tags=_TAGS)

#: 0-d int64 tensor on the device: the coordinate of this rank along a dim of the mesh with that text.
mesh_coordinate = torch.ops.dtensor_compile.mesh_coordinate.default
#: The chunk of this rank along a mesh dim, of a tensor whose `dim` divides by the size of the mesh dim.
shard_of = torch.ops.dtensor_compile.shard_of.default


def coordinate_in(mesh: DeviceMesh, mesh_dim: int, device: torch.device) -> torch.Tensor:
    """`mesh_coordinate` of a mesh object."""
    return mesh_coordinate(mesh_text(mesh), mesh_dim, device)


def _coordinate(mesh: str, mesh_dim: int) -> int:
    coordinate = parse_mesh(mesh).coordinate(my_rank())
    if coordinate is None:
        raise NoProcessGroupError(f"rank {my_rank()} is no rank of mesh {mesh}, and runs a graph over it")
    return coordinate[mesh_dim]


def _mesh_coordinate(mesh: str, mesh_dim: int, device: torch.device) -> torch.Tensor:
    return torch.full((), _coordinate(mesh, mesh_dim), dtype=torch.int64, device=device)


def _shard_of(x: torch.Tensor, dim: int, mesh: str, mesh_dim: int) -> torch.Tensor:
    return _chunk(x, dim, parse_mesh(mesh).shape[mesh_dim], _coordinate(mesh, mesh_dim))


def _chunk(x: torch.Tensor, dim: int, n: int, place: int) -> torch.Tensor:
    size = x.size(dim) // n
    return x.narrow(dim, size * place, size).clone()


_library.impl("mesh_coordinate", _mesh_coordinate, "CompositeExplicitAutograd")
_library._register_fake(
    "mesh_coordinate", lambda mesh, mesh_dim, device: torch.empty((), dtype=torch.int64, device=device)
)
_library.impl("shard_of", _shard_of, "CompositeExplicitAutograd")
_library._register_fake("shard_of", lambda x, dim, mesh, mesh_dim: _chunk(x, dim, parse_mesh(mesh).shape[mesh_dim], 0))
