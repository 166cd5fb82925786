"""``dtensor_compile::redistribute``: one change of placement, as an operator over local tensors.

    redistribute(Tensor local, str source, str target, str mesh, SymInt[] shape) -> Tensor

`source` and `target` are specs in text form (``ir/spec.py``), `mesh` is a mesh in text form (``ir/mesh.py``), `shape`
is the global shape. All of it is text and integers, the same on every rank: graphs with this node read well, go through
caches, and can be planned as a whole. The result never aliases the input. It is contiguous if something was sent; a
slice or a copy keeps the order of strides of the input. (So does torch, except that it leaves some uneven shards as
views of a padded buffer, with strides that depend on the device and on the rank.)

Its kernels run the plan of ``lowering/``: the eager one with collectives, so that every captured graph runs, the fake
one from plain integers. There is no gradient formula: DTensor redistributes below autograd, so the backward
redistribution is a node of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.aot.symbolic.shapes import divisors, guard_equal, has_hint, is_multiple, size_hints
from dtensor_compile.compat.distributed.device_meshes import my_rank
from dtensor_compile.compat.dtensor.specs import Placement, Shard
from dtensor_compile.errors import NoProcessGroupError, PlanError
from dtensor_compile.ir.mesh import MeshLayout, merged_group_name, parse_mesh
from dtensor_compile.ir.rank_free import is_rank_free
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.ops.expand import RankPlace, canonical, expand, local_shape
from dtensor_compile.planner.problem import Step
from dtensor_compile.planner.search import cheapest_plan
from dtensor_compile.topology.network import current_memory, network_of

_library = torch.library.Library("dtensor_compile", "DEF")
_library.define(
    "redistribute(Tensor local, str source, str target, str mesh, SymInt[] shape) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

redistribute_op = torch.ops.dtensor_compile.redistribute.default


def plan_of(
    source: str, target: str, layout: MeshLayout, shape: Sequence[Any], itemsize: int, *, bounded: bool = True
) -> tuple[Step, ...]:
    """The plan for a node, in the topology and within the memory for which this thread plans.

    Symbolic sizes count with their hints, which are the same on every rank; the plan is right for all sizes.

    Args:
        bounded: whether the memory bound counts. It does not while passes may still change redistributions.
    """
    sizes, memory = size_hints(shape), current_memory() if bounded else None
    known, network = divisors(shape), network_of(layout)
    return cheapest_plan(source, target, layout.shape, sizes, itemsize, network=network, divisors=known, memory=memory)


def _my_rank() -> int:
    if not dist.is_initialized():
        raise NoProcessGroupError(
            "dtensor_compile::redistribute needs torch.distributed: call torch.distributed.init_process_group() first "
            "(torchrun sets the environment for it)"
        )
    return my_rank()


def carry_out(local: torch.Tensor, source: str, target: str, mesh: str, shape: Sequence[Any]) -> torch.Tensor:
    """Redistributes `local` with functional collectives; this is the eager kernel, which the lowering traces."""
    layout, rank = parse_mesh(mesh), _my_rank()
    coordinate = layout.coordinate(rank)
    if coordinate is None:  # this rank is not part of the mesh: its local tensor is empty and stays so
        return local.clone()
    check_local(local, source, layout, coordinate, shape)
    return _carry_out(local, plan_of(source, target, layout, shape, local.element_size()), mesh, shape)


def _carry_out(local: torch.Tensor, steps: Sequence[Step], mesh: str, shape: Sequence[Any]) -> torch.Tensor:
    layout, rank = parse_mesh(mesh), _my_rank()
    place = RankPlace(layout, rank, lambda dims: merged_group_name(mesh, dims, rank), is_rank_free())
    out = expand(local, steps, place, shape)
    if _sends(steps) or any(isinstance(size, int) and size == 0 for size in out.shape):
        out = canonical(out)
    return local.clone() if out is local else out


def decided_by(source: str, target: str, mesh: str, shape: Sequence[int], itemsize: int) -> tuple[Any, ...]:
    """The rest of what determines the calls of `carry_out`, besides its arguments and the local tensor: the rank,
    whether the graph is rank-free, the plan, and its process groups.

    Makes missing groups that the plan needs.
    """
    layout, rank = parse_mesh(mesh), _my_rank()
    if layout.coordinate(rank) is None:
        return (rank,)
    steps = plan_of(source, target, layout, shape, itemsize)
    names = [merged_group_name(mesh, step.mesh_dims, rank) for step in steps if step.sends]
    return (rank, is_rank_free(), steps, *names)


def _sends(steps: Sequence[Step]) -> bool:
    return any(step.sends for step in steps)


def check_local(
    local: torch.Tensor, source: str, layout: MeshLayout, coordinate: Sequence[int], shape: Sequence[Any]
) -> None:
    """Raises `PlanError` if the shape of `local` is not that of the spec for the global shape; symbolic sizes pass."""
    wanted = (
        local_shape(parse_spec(source), layout, coordinate, shape)
        if len(parse_spec(source)) == len(coordinate)
        else None
    )
    if wanted is None or not all(isinstance(size, int) for size in (*local.shape, *wanted)):
        return
    if list(local.shape) != wanted:
        raise PlanError(
            f"local tensor of shape {list(local.shape)} does not fit {source} of {list(shape)} on {layout}: "
            f"at {list(coordinate)} it has the shape {wanted}"
        )


def _relate_sizes(local: torch.Tensor, source: Sequence[Placement], layout: MeshLayout, shape: Sequence[Any]) -> None:
    """Guards on the sizes of even shards: that of the local tensor times the ranks is the global one.

    Symbols of both come from the caller's tensors and are unrelated so far. The lowered graph computes the size of what
    it gathers from that of the local tensor. If it meets the global size only then, after the partition, the backward
    graph lacks one of the two symbols.
    """
    for d, size in enumerate(shape):
        n = math.prod(ranks for p, ranks in zip(source, layout.shape) if isinstance(p, Shard) and p.dim == d)
        symbolic = isinstance(size, torch.SymInt) and has_hint(size) and has_hint(local.size(d))
        if n > 1 and symbolic and is_multiple(size, n):
            guard_equal(local.size(d) * n, size)


def fake_result_of(local: torch.Tensor, source: str, target: str, mesh: str, shape: Sequence[Any]) -> torch.Tensor:
    """The result for a fake `local`; this is the fake kernel."""
    layout = parse_mesh(mesh)
    coordinate = layout.coordinate(_my_rank())
    if coordinate is None:
        return torch.empty_like(local)
    steps = plan_of(source, target, layout, shape, local.element_size(), bounded=False)
    check_local(local, source, layout, coordinate, shape)
    if _sends(steps):
        _relate_sizes(local, parse_spec(source), layout, shape)
        return local.new_empty(local_shape(parse_spec(target), layout, coordinate, shape))
    return _carry_out(local, steps, mesh, shape)


_library.impl("redistribute", carry_out, "CompositeExplicitAutograd")
_library._register_fake("redistribute", fake_result_of)
