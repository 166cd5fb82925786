"""`mark_sharding` and its family: shardings of tensors, given as partition specs.

A mark is metadata on a plain tensor that every rank has in full. Marks do not change the meaning of the program, in
eager and under other backends; ``backend="dtensor"`` shards its computation as the marks say (`spmd.spread`), and
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
from dtensor_compile.compat.dynamo.trackers.tracker_tools import fact_guard
from dtensor_compile.errors import MeshError, PlacementError
from dtensor_compile.spmd.constraint import agree, as_dtensor, constrain
from dtensor_compile.spmd.logical_mesh import Mesh, get_global_mesh
from dtensor_compile.spmd.partition_spec import PartitionSpec, axes_to_placements
from dtensor_compile.spmd.propagate import SpreadMark

_NOTE = "_dtensor_compile_mark"
#: Texts of the meshes of all marks in this process: programs with marks mix plain tensors, which are equal on all
#: ranks, with DTensors.
_marked_meshes: set[str] = set()
#: Whether the program that is being traced may mix them without a mark.
_allowed_outside: ContextVar[bool | None] = ContextVar("_allowed_outside", default=None)


@dataclass(frozen=True)
class MarkOn:
    """A mark and its mesh."""

    mesh: Mesh
    mark: SpreadMark


def mark_of(t: Any) -> MarkOn | None:
    """The mark of a tensor, set by `mark_sharding`; None if it has none."""
    return getattr(t, _NOTE, None) if isinstance(t, torch.Tensor) else None


_guard_mark = fact_guard("MARK", mark_of)


def guard_marks(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Guards the code that is being compiled on the marks of its inputs, if anything was marked in this process."""
    if not _marked_meshes:
        return
    placed = []
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs):
        if isinstance(value, torch.Tensor) and "grapharg" in node.meta:
            if not isinstance(value, DTensor):
                _guard_mark(node.meta["grapharg"].source)
            elif mark_of(value) is not None:
                placed.append(node)
    if placed:  # on DTensors marks only allow plain tensors beside them, for which one mark is enough
        _guard_mark(placed[0].meta["grapharg"].source)


def note_mark(t: torch.Tensor, mesh: Mesh, mark: SpreadMark) -> None:
    """Marks a tensor; on a DTensor a mark means that plain tensors beside it are equal on all ranks."""
    setattr(t, _NOTE, MarkOn(mesh, mark))


def anything_is_marked() -> bool:
    """Whether something was marked in this process, so that programs may have annotations."""
    return bool(_marked_meshes)


@contextlib.contextmanager
def plain_tensors_are_replicated() -> Iterator[None]:
    """While tracing, operators accept plain tensors beside DTensors, if anything was marked in this process.

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
    """For the rest of a trace of a program without marks: operators refuse plain tensors beside DTensors if eager does.

    The compiled code is guarded on whether eager accepts them.
    """
    allowed = _allowed_outside.get()
    if allowed is not None:
        allow_implicit_replication(allowed)
    guard_implicit_replication()


def mark_sharding(
    t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec, *, open_dims: Sequence[int] = (), priority: int = 0
) -> torch.Tensor:
    """Sets the mesh axes that shard each dim of a tensor; returns the tensor. No communication.

    Args:
        t: a plain tensor that is equal on all ranks; in a compiled function any tensor.
        partition_spec: see `spmd.partition_spec`.
        open_dims: dims that the propagation may shard further. Not in a compiled function.
        priority: marks with a smaller number spread first. Not in a compiled function.

    Raises:
        PlacementError: the spec is invalid or does not fit the tensor; outside of a compiled function: `t` is a
            DTensor, whose placements are fixed.
        MeshError: there is no torch mesh for `mesh`.
    """
    axes = mesh.axes(partition_spec, t.dim())
    if torch.compiler.is_compiling():
        return constrain(t, mesh_text_in_program(mesh, t), axes, False)
    if isinstance(t, DTensor):
        raise PlacementError(
            f"a DTensor already has placements ({tuple(t.placements)}): use redistribute, or mark the plain tensor"
        )
    for dim in open_dims:
        if not 0 <= dim < t.dim():
            raise PlacementError(f"open dim {dim}: the tensor has dims 0 to {t.dim() - 1}")
    _use(mesh, t)
    note_mark(t, mesh, SpreadMark(axes, tuple(open_dims), priority))
    return t


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """In a compiled function: constrains the sharding of the value in the forward, and of its gradient in the backward.

    Use the result. Outside of a compiled function it is the tensor itself, marked.
    """
    axes = mesh.axes(partition_spec, t.dim())
    made = constrain(t, mesh_text_in_program(mesh, t), axes, True)
    if not torch.compiler.is_compiling():
        note_mark(made, mesh, SpreadMark(axes))
    return made


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Removes the mark of a tensor, and returns the tensor."""
    if hasattr(t, _NOTE):
        delattr(t, _NOTE)
    return t


def wrap_as_sharded_tensor(
    t: torch.Tensor, mesh: Mesh | None = None, partition_spec: PartitionSpec | None = None
) -> DTensor:
    """The tensor as a DTensor: sharded by the spec, or else by its mark, or else replicated over `mesh` or the global
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
    note_mark(made, mesh, SpreadMark(axes))
    return made


def unwrap_sharded_tensor(t: torch.Tensor) -> torch.Tensor:
    """The full value of a DTensor as a plain tensor, on every rank; other tensors unchanged."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def wrap_if_sharded(x: Any) -> Any:
    """`wrap_as_sharded_tensor` of a marked tensor; anything else unchanged."""
    return wrap_as_sharded_tensor(x) if mark_of(x) is not None else x


def shard_as(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with equal placements: in a compiled function those that the propagation finds, otherwise those of
    the first. Use the results.

    Raises:
        PlacementError: their shapes differ.
    """
    if len({tuple(t.shape) for t in tensors}) > 1:
        raise PlacementError(f"shard_as needs tensors of one shape, not {[list(t.shape) for t in tensors]}")
    return agree(*tensors)


def _use(mesh: Mesh, t: torch.Tensor) -> DeviceMesh:
    device_mesh = mesh.to_device_mesh(t.device.type)
    _marked_meshes.add(mesh.text)
    return device_mesh


def mesh_text_in_program(mesh: Mesh, t: torch.Tensor) -> str:
    """Text of a mesh for a call of this package in a program, compiled or not."""
    if not torch.compiler.is_compiling():
        _use(mesh, t)
    if not mesh.text:
        raise MeshError("the first use of a mesh is in a compiled function: call mesh.to_device_mesh() before it")
    return mesh.text
