"""``dtensor_compile::redistribute``: one change of placement, as an operator over local tensors.

    redistribute(Tensor local, str source, str target, str mesh, SymInt[] shape) -> Tensor

`source` and `target` are specs in text form (``capture/spec.py``), `mesh` is a mesh in text form (``capture/mesh.py``), `shape`
is the global shape. All of it is text and integers, the same on every rank: graphs with this node read well, go through
caches, and can be planned as a whole. The result never aliases the input.

Its kernels run the plan of ``lowering/``: the eager one with collectives, so that every captured graph runs, the fake one from
plain integers. There is no gradient formula: DTensor redistributes below autograd, so the backward redistribution is a node of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.capture import mesh as mesh_module
from dtensor_compile.capture.mesh import MeshLayout, parse_mesh
from dtensor_compile.capture.spec import parse_spec
from dtensor_compile.compat.dtensor import make_spec, stock_redistribute_local
from dtensor_compile.compat.shapes import size_hints
from dtensor_compile.errors import NoProcessGroupError
from dtensor_compile.lowering.expand import expand, local_shape
from dtensor_compile.lowering.plan import Step, plan

_library = torch.library.Library("dtensor_compile", "DEF")
_library.define(
    "redistribute(Tensor local, str source, str target, str mesh, SymInt[] shape) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

redistribute_op = torch.ops.dtensor_compile.redistribute.default


def plan_of(source: str, target: str, layout: MeshLayout, shape: Sequence[Any], itemsize: int) -> tuple[Step, ...]:
    """The plan for a node: symbolic sizes count with their hints, which are the same on every rank."""
    return plan(source, target, layout.shape, size_hints(shape), itemsize)


def _my_rank() -> int:
    if not dist.is_initialized():
        raise NoProcessGroupError(
            "dtensor_compile::redistribute needs torch.distributed: call torch.distributed.init_process_group() first "
            "(torchrun sets the environment for it)"
        )
    return dist.get_rank()


def carry_out(local: torch.Tensor, source: str, target: str, mesh: str, shape: Sequence[Any]) -> torch.Tensor:
    """Redistributes `local` with functional collectives; what the eager kernel does and the lowering traces."""
    layout, rank = parse_mesh(mesh), _my_rank()
    coordinate = layout.coordinate(rank)
    if coordinate is None:  # this rank is not part of the mesh: its local tensor is empty and stays so
        return local.clone()
    steps = plan_of(source, target, layout, shape, local.element_size())
    if any(step.kind == "torch" for step in steps):
        return _by_torch(local, source, target, mesh, shape)
    out = expand(
        local, steps, parse_spec(source), layout, coordinate, shape, lambda i: mesh_module.group_name(mesh, i, rank)
    )
    return local.clone() if out is local else out


def _by_torch(local: torch.Tensor, source: str, target: str, mesh: str, shape: Sequence[Any]) -> torch.Tensor:
    """Strided shards: torch knows in which order their pieces lie."""
    device_mesh = mesh_module.live_mesh(mesh)
    specs = [make_spec(device_mesh, parse_spec(text), shape, local.dtype) for text in (source, target)]
    out = stock_redistribute_local(local, *specs)
    if hasattr(out, "wait"):
        out = out.wait()
    return local.clone() if out is local else out


def _fake(local: torch.Tensor, source: str, target: str, mesh: str, shape: Sequence[Any]) -> torch.Tensor:
    layout = parse_mesh(mesh)
    coordinate = layout.coordinate(_my_rank())
    if coordinate is None:
        return torch.empty_like(local)
    steps = plan_of(source, target, layout, shape, local.element_size())
    if steps and all(step.kind in _CONTIGUOUS for step in steps):
        return local.new_empty(local_shape(parse_spec(target), layout, coordinate, shape))
    return carry_out(local, source, target, mesh, shape)


#: Steps whose result is contiguous whatever the strides of the input.
_CONTIGUOUS = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all"})

_library.impl("redistribute", carry_out, "CompositeExplicitAutograd")
_library._register_fake("redistribute", _fake)
