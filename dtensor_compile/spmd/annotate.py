"""`mark_sharding` and its family: which tensors lie where, said in partition specs.

A mark is a note on a plain tensor, which every rank has whole. The program means what it means without marks, in eager
and under other backends; ``backend="dtensor"`` shards its computation as the marks say (`spmd.spread`), and
`spmd.shard_module` the storage of parameters as well. In a compiled function a mark is a constraint on the value from
there on; it does not break the graph.

    mark_sharding(model.up.weight, mesh, ("tp", None))        # a parameter or a buffer
    mark_sharding(x, mesh, ("dp", None))                      # an input
    h = model.up(x); mark_sharding(h, mesh, ("dp", "tp"))     # in a compiled function: an intermediate
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.dynamo.settings import (
    allow_implicit_replication,
    guard_implicit_replication,
    implicit_replication,
    implicit_replication_is_allowed,
)
from dtensor_compile.compat.dynamo.tracker_tools import fact_guard
from dtensor_compile.errors import MeshError, PlacementError
from dtensor_compile.spmd.constraint import agree, as_dtensor, constrain
from dtensor_compile.spmd.logical_mesh import Mesh, get_global_mesh
from dtensor_compile.spmd.partition_spec import PartitionSpec, axes_to_placements
from dtensor_compile.spmd.propagate import SpreadMark

_NOTE = "_dtensor_compile_mark"
#: Texts of the meshes that something was marked on: programs with marks mix plain tensors, which are equal on all
#: ranks, with DTensors.
_marked_meshes: set[str] = set()
#: Whether the program that is being traced may do so without a mark.
_allowed_outside: ContextVar[bool | None] = ContextVar("_allowed_outside", default=None)


@dataclass(frozen=True)
class MarkOn:
    """A mark and the mesh that it speaks of."""

    mesh: Mesh
    mark: SpreadMark


def mark_of(t: Any) -> MarkOn | None:
    """What `mark_sharding` noted on a tensor."""
    return getattr(t, _NOTE, None) if isinstance(t, torch.Tensor) else None


_guard_mark = fact_guard("MARK", mark_of)


def guard_marks(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """The code that is being compiled holds for inputs with these marks, if anything was marked in this process."""
    if not _marked_meshes:
        return
    placed = []
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs):
        if isinstance(value, torch.Tensor) and "grapharg" in node.meta:
            if not isinstance(value, DTensor):
                _guard_mark(node.meta["grapharg"].source)
            elif mark_of(value) is not None:
                placed.append(node)
    if placed:  # on DTensors marks say no more than that plain tensors may stand beside them: one is enough for that
        _guard_mark(placed[0].meta["grapharg"].source)


def note(t: torch.Tensor, mesh: Mesh, mark: SpreadMark) -> None:
    """Puts a mark on a tensor; on a DTensor it says that plain tensors beside it are equal on all ranks."""
    setattr(t, _NOTE, MarkOn(mesh, mark))


def anything_is_marked() -> bool:
    """Whether something was marked in this process, so that programs may have annotations."""
    return bool(_marked_meshes)


@contextlib.contextmanager
def plain_tensors_are_replicated() -> Iterator[None]:
    """For the time of tracing: operators take plain tensors beside DTensors, if anything was marked in this process.

    Only the captured graph shows whether the program has marks: see `plain_tensors_are_as_outside`.
    """
    if not _marked_meshes:
        yield
        return
    token = _allowed_outside.set(implicit_replication_is_allowed())
    try:
        with implicit_replication():
            yield
    finally:
        _allowed_outside.reset(token)


def plain_tensors_are_as_outside() -> None:
    """For the rest of a trace of a program without marks: operators refuse plain tensors beside DTensors where eager
    does.

    The compiled code holds for calls where eager takes them too.
    """
    allowed = _allowed_outside.get()
    if allowed is not None:
        allow_implicit_replication(allowed)
    guard_implicit_replication()


def mark_sharding(
    t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec, *, open_dims: Sequence[int] = (), priority: int = 0
) -> torch.Tensor:
    """Says which mesh axes cut which dim of a tensor; returns the tensor. Sends nothing.

    Args:
        t: a plain tensor that is equal on all ranks; in a compiled function any tensor.
        partition_spec: see `spmd.partition_spec`.
        open_dims: dims that the propagation may cut further. Not in a compiled function.
        priority: marks of a smaller number spread first. Not in a compiled function.

    Raises:
        PlacementError: the spec breaks a rule or does not fit the tensor; outside of a compiled function: `t` is a
            DTensor, whose placements are what they are.
        MeshError: there is no torch mesh for `mesh`.
    """
    axes = mesh.axes(partition_spec, t.dim())
    if torch.compiler.is_compiling():
        return constrain(t, mesh_text_in_program(mesh, t), axes, False)
    if isinstance(t, DTensor):
        raise PlacementError(
            f"a DTensor {tuple(t.placements)} is placed already: use redistribute, or mark the plain tensor"
        )
    for dim in open_dims:
        if not 0 <= dim < t.dim():
            raise PlacementError(f"open dim {dim}: the tensor has the dims 0 to {t.dim() - 1}")
    _use(mesh, t)
    note(t, mesh, SpreadMark(axes, tuple(open_dims), priority))
    return t


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """In a compiled function: the value is cut along mesh axes on its way forward, and its gradient on its way back.

    Use the result. Outside of a compiled function it is the value itself, with a mark.
    """
    axes = mesh.axes(partition_spec, t.dim())
    made = constrain(t, mesh_text_in_program(mesh, t), axes, True)
    if not torch.compiler.is_compiling():
        note(made, mesh, SpreadMark(axes))
    return made


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Takes the mark off a tensor, and returns it."""
    if hasattr(t, _NOTE):
        delattr(t, _NOTE)
    return t


def wrap_as_sharded_tensor(
    t: torch.Tensor, mesh: Mesh | None = None, partition_spec: PartitionSpec | None = None
) -> DTensor:
    """The tensor as a DTensor: cut as the spec says, else as it is marked, else replicated over `mesh` or the global
    mesh.

    Raises:
        MeshError: no mesh is given, marked or set.
    """
    if isinstance(t, DTensor):
        return t
    marked = mark_of(t)
    mesh = mesh or (marked.mesh if marked else get_global_mesh())
    if mesh is None:
        raise MeshError("wrap_as_sharded_tensor needs a mesh: give one, mark the tensor, or call set_global_mesh first")
    if partition_spec is not None:
        axes = mesh.axes(partition_spec, t.dim())
    else:
        axes = marked.mark.axes if marked and marked.mesh == mesh else ((),) * t.dim()
    device_mesh = _use(mesh, t)
    made = as_dtensor(t, device_mesh).redistribute(device_mesh, axes_to_placements(axes, mesh.mesh_shape))
    note(made, mesh, SpreadMark(axes))
    return made


def unwrap_sharded_tensor(t: torch.Tensor) -> torch.Tensor:
    """The whole value of a DTensor as a plain tensor, on every rank; other tensors as they are."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def wrap_if_sharded(x: Any) -> Any:
    """`wrap_as_sharded_tensor` of what is marked; anything else as it is."""
    return wrap_as_sharded_tensor(x) if mark_of(x) is not None else x


def shard_as(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, placed alike: in a compiled function as the propagation finds, otherwise as the first. Use the
    results.

    Raises:
        PlacementError: they differ in shape.
    """
    if len({tuple(t.shape) for t in tensors}) > 1:
        raise PlacementError(f"shard_as takes tensors of one shape, not {[list(t.shape) for t in tensors]}")
    return agree(*tensors)


def _use(mesh: Mesh, t: torch.Tensor) -> DeviceMesh:
    device_mesh = mesh.to_device_mesh(t.device.type)
    _marked_meshes.add(mesh.text)
    return device_mesh


def mesh_text_in_program(mesh: Mesh, t: torch.Tensor) -> str:
    """The text of a mesh for a call of this package in a program, compiled or not."""
    if not torch.compiler.is_compiling():
        _use(mesh, t)
    if not mesh.text:
        raise MeshError(
            "a mesh is used in a compiled function for the first time: call mesh.to_device_mesh() before it"
        )
    return mesh.text
