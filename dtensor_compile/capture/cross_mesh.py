"""`redistribute`: a DTensor on another mesh, with a gradient.

torch's ``DTensor.redistribute(device_mesh=other)`` raises if placements change. This function sends what is needed, in
one exchange among the ranks of both meshes (``ops/cross_mesh_plan.py``), in eager and as one node of a compiled graph:

    y = dtensor_compile.redistribute(x, stage_1, [Shard(0)])       # x on stage_0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dtensor_compile.capture.checks import check_mesh, check_placements
from dtensor_compile.compat.distributed.device_meshes import my_rank, real_mesh
from dtensor_compile.compat.dtensor.specs import (
    MaskPartial,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    apply_mask,
    canonical_placements,
    is_traced,
    local_and_spec,
    make_spec,
    with_local,
)
from dtensor_compile.errors import MeshError, PlacementError, SpecTextError
from dtensor_compile.ir.mesh import join_meshes, mesh_layout, mesh_text, parse_mesh
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.ops.redistribute_across import redistribute_across_op, source_of_all


@torch.compiler.allow_in_graph
def redistribute(x: DTensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """`x` with these placements on this mesh, which may have other ranks or another shape than its own, or be a part of
    it.

    Every rank of both meshes calls it; on a mesh that does not contain a rank, its local tensor has shape ``(0,)``, as
    in torch. The ranks of both meshes create a process group the first time. On the mesh of `x` it is
    ``x.redistribute``. A slice of a mesh (``mesh["tp"]``) stands for all such slices: they hold the same tensor, and so
    do their gradients.

    The gradient returns to the mesh of `x` and its placements; where those are partial it is replicated, as in torch.

    Args:
        x: of any global shape; sizes are constants while compiling.
        device_mesh: of the same device type.
        placements: one per mesh dim; not partial.

    Returns:
        a contiguous DTensor of the same global shape.

    Raises:
        MeshError: the meshes are of different device types, list ranks in other than ascending order, or do not fit the
            job.
        PlacementError: the placements do not fit the mesh or the tensor, or one is of a user-defined class.
        PlanError: the target is partial, or the source is partial with two reductions whose order matters.
        NoProcessGroupError: not all ranks of both meshes joined within a minute.
    """
    mesh, own = real_mesh(device_mesh), real_mesh(x.device_mesh)
    if mesh == own:
        return x.redistribute(device_mesh, placements)
    if mesh.device_type != own.device_type:
        raise MeshError(
            f"redistribute from {mesh_layout(own)} to {mesh_layout(mesh)}: a tensor does not change from "
            f"{own.device_type!r} to {mesh.device_type!r}; move its local tensor first, or use a mesh of "
            f"{own.device_type!r}"
        )
    for each in (own, mesh):
        check_mesh(each)
        if not mesh_layout(each).in_rank_order:
            raise MeshError(
                f"redistribute from {mesh_layout(own)} to {mesh_layout(mesh)}: the ranks of {mesh_layout(each)} do not "
                "ascend with their coordinates, and the meaning of shards then depends on torch's steps; create a mesh "
                "of ascending ranks"
            )
    check_placements(placements, device_mesh, x.dim(), f"a tensor of shape {list(x.shape)}")
    return _Across.apply(x, device_mesh, tuple(_from_front(p, x.dim()) for p in placements), False)


def _from_front(placement: Placement, ndim: int) -> Placement:
    """The placement with its tensor dim counted from the front."""
    if type(placement) is Shard:
        return Shard(placement.dim % ndim)
    if isinstance(placement, StridedShard):
        return StridedShard(placement.dim % ndim, split_factor=placement.split_factor)
    return placement


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], known: bool) -> DTensor:
        """`known`: whether every rank, including those outside of its mesh, knows the placements of `x`."""
        local, spec = local_and_spec(x)
        before = canonical_placements(spec)
        for p in before:
            if isinstance(p, MaskPartial):
                local = apply_mask(p, local)
        try:
            source = spec_text([Partial(p.reduce_op) if isinstance(p, MaskPartial) else p for p in before])
            target = spec_text(placements)
        except SpecTextError as error:
            raise PlacementError(
                f"redistribute {tuple(before)} to {tuple(placements)} on another mesh: {error}"
            ) from error
        meshes = mesh_text(spec.mesh), mesh_text(mesh)
        if not known and not is_traced(
            local
        ):  # while tracing, all ranks make the same decision (compat/dtensor/rules/sharding.py)
            source = source_of_all(source, *meshes, x.shape, local)
        ctx.here = mesh, placements
        ctx.back = spec.mesh, tuple(Replicate() if isinstance(p, Partial) else p for p in parse_spec(source))
        out = redistribute_across_op(local, source, target, *meshes, list(x.shape), 0)
        return with_local(out, make_spec(mesh, placements, x.shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None, None, None]:  # type: ignore[override]
        # First to the placements of the result: ranks outside of its mesh do not know those of the gradient.
        return _Across.apply(gradient.redistribute(*ctx.here), *ctx.back, True), None, None, None


def join_groups(gm: torch.fx.GraphModule) -> None:
    """Creates the process groups of redistributions between meshes in a Dynamo graph, before anything is compiled.

    Raises:
        NoProcessGroupError: not all ranks of both meshes of one joined.
    """
    for node in gm.graph.find_nodes(op="call_function", target=redistribute):
        source, target = (node.args[0].meta["example_value"].device_mesh, node.meta["example_value"].device_mesh)
        texts = mesh_text(source), mesh_text(target)
        ranks = {rank for text in texts for rank in parse_mesh(text).ranks}
        if texts[0] != texts[1] and my_rank() in ranks:
            join_meshes(texts, tuple(ranks))
