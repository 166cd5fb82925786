"""``dtensor_compile::redistribute_across``: one change of mesh and placement, as an operator over local tensors.

    redistribute_across(Tensor local, str source, str target, str source_mesh, str target_mesh, SymInt[] shape, int
    order)
        -> Tensor

Like ``dtensor_compile::redistribute`` (``ops/redistribute.py``), with two meshes. The local tensor of a rank that is
not part of a mesh is empty (`ops.cross_mesh_plan.absent`). `order` is the place among all communication of a graph: on
ranks outside of the source mesh two nodes could otherwise be equal, and on ranks outside of the target mesh they are
unused. No node is ever dropped, since other ranks count on it.

The eager kernel makes the process group over both meshes if there is none yet (`ir.mesh.join_meshes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.errors import PlanError
from dtensor_compile.ir.mesh import join_meshes, merged_group_name, parse_mesh
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.ops import c10d as collectives
from dtensor_compile.ops.cross_mesh_plan import Across, absent, expand_across, plan_across
from dtensor_compile.ops.expand import local_shape
from dtensor_compile.ops.redistribute import check_local
from dtensor_compile.topology.network import current_memory


def across_plan_of(
    source: str,
    target: str,
    source_mesh: str,
    target_mesh: str,
    shape: Sequence[Any],
    itemsize: int,
    *,
    bounded: bool = True,
) -> Across:
    """The plan for a node, within the memory for which this thread plans if it is to be `bounded`.

    Exchanges are planned in integers, so that symbolic sizes are specialized here.
    """
    meshes, memory = (parse_mesh(source_mesh), parse_mesh(target_mesh)), current_memory() if bounded else None
    return plan_across(source, target, *meshes, tuple(map(int, shape)), itemsize, memory)


def carry_out_across(
    local: torch.Tensor, source: str, target: str, source_mesh: str, target_mesh: str, shape: Sequence[Any], order: int
) -> torch.Tensor:
    """Redistributes `local` with functional collectives; this is the eager kernel, which the lowering traces."""
    rank, layout, sizes = dist.get_rank(), parse_mesh(source_mesh), tuple(map(int, shape))
    this = across_plan_of(source, target, source_mesh, target_mesh, sizes, local.element_size())
    _check_local(local, source, source_mesh, sizes)

    def union_name(ranks: tuple[int, ...]) -> str:
        return join_meshes((source_mesh, target_mesh), ranks)

    out = expand_across(
        local, this, rank, layout, sizes, lambda dims: merged_group_name(source_mesh, dims, rank), union_name
    )
    return local.clone() if out is local else out


def _check_local(local: torch.Tensor, source: str, source_mesh: str, shape: Sequence[int]) -> None:
    layout = parse_mesh(source_mesh)
    coordinate = layout.coordinate(dist.get_rank())
    if coordinate is not None:
        check_local(local, source, layout, coordinate, shape)


def _fake(
    local: torch.Tensor, source: str, target: str, source_mesh: str, target_mesh: str, shape: Sequence[Any], order: int
) -> torch.Tensor:
    sizes, layout = tuple(map(int, shape)), parse_mesh(target_mesh)
    across_plan_of(source, target, source_mesh, target_mesh, sizes, local.element_size(), bounded=False)
    _check_local(local, source, source_mesh, sizes)
    coordinate = layout.coordinate(dist.get_rank())
    if coordinate is None:
        return absent(local, sizes)
    return local.new_empty(local_shape(parse_spec(target), layout, coordinate, sizes))


redistribute_across_op = collectives.define(
    "redistribute_across",
    "(Tensor local, str source, str target, str source_mesh, str target_mesh, SymInt[] shape, int order) -> Tensor",
    carry_out_across,
    _fake,
)

#: Every operator that communicates in a graph as it is captured, with its place in the order as its last argument.
ORDERED = collectives.COMMUNICATION | {redistribute_across_op}

#: Bytes of the text of a spec and a shape on its way to other ranks.
_TEXT = 512


def source_of_all(source: str, source_mesh: str, target_mesh: str, shape: Sequence[int], like: torch.Tensor) -> str:
    """The spec on the first rank of the source mesh, for eager calls that include ranks outside of that mesh.

    On those ranks torch may choose other placements of results: it assumes that redistributions cost nothing there. All
    ranks of both meshes call this.

    Raises:
        PlanError: this rank has another global shape.
    """
    layout = parse_mesh(source_mesh)
    ranks, rank = tuple(sorted({*layout.ranks, *parse_mesh(target_mesh).ranks})), dist.get_rank()
    if len(ranks) == len(layout.ranks) or rank not in ranks:
        return source
    mine = f"{source} of {list(shape)}"
    sent = torch.tensor([*mine.encode().ljust(_TEXT)], dtype=torch.uint8, device=like.device)
    group = compat_mesh.group_named(join_meshes((source_mesh, target_mesh), ranks))
    dist.broadcast(sent, src=min(layout.ranks), group=group)
    received, _, sizes = bytes(sent.tolist()).decode().rstrip().partition(" of ")
    if sizes != str(list(shape)):
        raise PlanError(
            f"redistribute from mesh {source_mesh} to {target_mesh}: the tensor has the shape {sizes} on rank "
            f"{min(layout.ranks)} and {list(shape)} on rank {rank}, which is not part of its mesh; DTensor.from_local "
            "there needs shape= and stride="
        )
    return received
