"""`shard_module`: stores parameters and buffers as marked, and unmarked ones as the marks imply.

Marks alone keep every tensor full on every rank, and shard the computation. Here each parameter and buffer becomes a
DTensor: sharded if it is marked or if the propagation over one call of the module shards it (`spmd.propagate`),
replicated otherwise. Optimizer states follow their parameters, so create the optimizer afterwards.
    mark_sharding(block.attention.wq.weight, mesh, ("tp", None))
    # wk, wv follow wq: the heads of attention belong together
    print(shard_module(model, tokens).table())
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.dtensor.module_state import replace_tensors
from dtensor_compile.compat.dtensor.record import record_module
from dtensor_compile.compat.dynamo.recurrent_functions import replaced
from dtensor_compile.errors import MeshError
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.spmd.annotate import mark_of, note_mark
from dtensor_compile.spmd.constraint import as_dtensor
from dtensor_compile.spmd.factor_cache import FactorCache
from dtensor_compile.spmd.logical_mesh import Mesh, get_global_mesh
from dtensor_compile.spmd.partition_spec import Axes, axes_to_placements
from dtensor_compile.spmd.propagate import SpreadMark, propagate
from dtensor_compile.spmd.recurrent import IN_PROGRAMS


@dataclass(frozen=True)
class Placed:
    """Storage of one parameter or buffer, and the reason: ``"marked"``, ``"follows"`` from marks, ``"replicated"``."""

    name: str
    spec: str
    why: str


@dataclass(frozen=True)
class ShardedModule:
    """Result of `shard_module`."""

    placed: tuple[Placed, ...]

    def table(self) -> Table:
        """The result as a ``rich`` table."""
        table = Table("tensor", "placements", "why")
        for row in self.placed:
            table.add_row(row.name, row.spec, row.why)
        return table


def find_shardings(module: nn.Module, inputs: Sequence[Any], mesh: Mesh) -> dict[str, Axes]:
    """The axes of each parameter and buffer that follow from the marks on them, on `inputs`, and on values that the
    module computes.

    No computation, no communication.

    Raises:
        Whatever the module raises on fake tensors.
    """
    marks: list[tuple[torch.Tensor, SpreadMark]] = []

    def given(real: torch.Tensor, fake: torch.Tensor) -> None:
        marked = mark_of(real)
        if marked is not None:
            marks.append((fake, marked.mark))

    with replaced(IN_PROGRAMS):
        program, fakes = record_module(module, inputs, given)
    for tensor in {id(t): t for operator in program.operators for t in operator.results}.values():
        given(tensor, tensor)  # tensors that the module marks in its forward
    shardings = propagate(program, marks, mesh.mesh_shape, FactorCache(mesh.to_device_mesh()))
    return {name: shardings[id(fake)].axes for name, fake in fakes.items() if id(fake) in shardings}


def shard_module(module: nn.Module, *example_inputs: Any, src_data_rank: int | None = 0) -> ShardedModule:
    """Makes the parameters and buffers of a module DTensors; see the module docstring. All ranks have to call it.

    Args:
        example_inputs: one call, marked as the real inputs will be; without them unmarked tensors are replicated.
        src_data_rank: the rank whose values are used; None sends nothing, if all ranks have equal values.

    Raises:
        MeshError: nothing is marked and no global mesh is set, or marks are on several meshes.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    mesh = _mesh_of([*tensors.values(), *example_inputs])
    device_mesh = mesh.to_device_mesh()
    found = find_shardings(module, example_inputs, mesh) if example_inputs else {}
    made: dict[int, torch.Tensor] = {}
    rows = []
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            continue
        marked = mark_of(tensor)
        axes = found.get(name, marked.mark.axes if marked else ((),) * tensor.dim())
        placements = axes_to_placements(axes, mesh.mesh_shape)
        with torch.no_grad():
            value = tensor.detach().contiguous().clone()
            if src_data_rank is not None:
                dist.broadcast(value, src_data_rank)
            placed = as_dtensor(value, device_mesh).redistribute(device_mesh, placements)
        is_parameter = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(placed, requires_grad=tensor.requires_grad) if is_parameter else placed
        note_mark(made[id(tensor)], mesh, SpreadMark(axes))
        rows.append(
            Placed(name, spec_text(placements), "marked" if marked else "follows" if any(axes) else "replicated")
        )
    replace_tensors(module, made)
    return ShardedModule(tuple(rows))


def _mesh_of(values: Sequence[Any]) -> Mesh:
    meshes = {marked.mesh for marked in map(mark_of, values) if marked is not None}
    if len(meshes) > 1:
        raise MeshError(f"marks are on several meshes: {', '.join(map(repr, meshes))}; use one")
    mesh = meshes.pop() if meshes else get_global_mesh()
    if mesh is None:
        raise MeshError("nothing is marked: call mark_sharding on some parameters or inputs, or set_global_mesh")
    return mesh
