"""Marks of local tensors, noted in their nodes while torch traces: spec, mesh and global shape.

    mm: [4, 16]   of   S(1) of [4, 64] on cpu[tp=4:1]@4

A redistribute node has these as arguments. For nodes between two of them, a graph of local tensors does not show
whether an operand is the same on every rank, or the global shapes of a view if sizes differ between ranks. DTensor
knows; it marks the tensors that it passes to an operator, the first time for equal ones. Marks are text and plain
integers, the same on every rank, so that decisions of passes may depend on them.

A mark has the meaning of a DTensor's spec: the local tensors of all ranks are those of one global tensor. A program for
which that is wrong (`DTensor.from_local` of different values on each rank as `Replicate`) gets the results of torch's
own shortcuts.

These have no mark: plain tensors, nodes inside of a decomposed operator, symbolic shapes, tensors for which the program
names two specs, and local tensors of another shape than their spec says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from dtensor_compile.compat.aot.dtensor_observer import locals_hook
from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.dtensor.specs import Spec, canonical_placements
from dtensor_compile.compat.dynamo.observers.observe import node_of
from dtensor_compile.errors import PlanError, SpecTextError
from dtensor_compile.ir.mesh import mesh_text, parse_mesh
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.ops.redistribute import check_local

#: Key of a node's ``meta``: its `Mark`; None if the program says contradictory things, or things without a mark.
MARK = "dtensor_compile_mark"


class Mark(NamedTuple):
    """The global form of a local tensor: texts of a spec and a mesh, and a shape of plain integers."""

    spec: str
    mesh: str
    shape: tuple[int, ...]


#: Marks made while this thread traces for our backend, by the spec and the shape of the local tensor.
_marks: ContextVar[dict[Any, Mark | None] | None] = ContextVar("marks", default=None)


@contextlib.contextmanager
def mark_local_tensors() -> Iterator[None]:
    """While active, nodes that this thread traces get marks."""
    token = _marks.set({})
    try:
        with locals_hook(mark_node):
            yield
    finally:
        _marks.reset(token)


def mark_node(local: torch.Tensor, spec: Spec) -> None:
    """Notes the global form of a local tensor in its node."""
    made = _marks.get()
    node = node_of(local) if made is not None else None
    if made is None or node is None:
        return
    this = None
    if spec.tensor_meta is not None and all(type(size) is int for size in (*spec.tensor_meta.shape, *local.shape)):
        key = spec, local.shape
        if key not in made:
            made[key] = _mark_of(local, spec, tuple(spec.tensor_meta.shape))
        this = made[key]
    node.meta[MARK] = this if node.meta.get(MARK, this) == this else None


def _mark_of(local: torch.Tensor, spec: Spec, shape: tuple[int, ...]) -> Mark | None:
    mesh = compat_mesh.real_mesh(spec.mesh)
    if not compat_mesh.is_member(mesh):
        return None
    try:
        this = Mark(spec_text(canonical_placements(spec)), mesh_text(mesh), shape)
        layout = parse_mesh(this.mesh)
        check_local(local, this.spec, layout, mesh.get_coordinate() or (), shape)
    except (SpecTextError, PlanError):
        return None
    return this if layout.in_rank_order else None
