"""What a local tensor is globally, noted in its node while torch traces: the spec, the mesh and the global shape.

    mm: [4, 16]   of   S(1) of [4, 64] on cpu[tp=4:1]@4

A redistribute node says so of itself. Of what lies between two of them a graph of local tensors says nothing: whether
an operand is the same on every rank, or what a view is where ranks hold other sizes. DTensor knows, and says it of the
tensors that it hands to an operator, the first time for equal ones. Marks are text and plain integers, the same on
every rank, so that passes may decide by them.

A mark means what the spec of a DTensor means: that the local tensors of all ranks are those of one global tensor. A
program that says so of what is not (`DTensor.from_local` of other values on each rank as `Replicate`) gets what torch's
own shortcuts would give it.

Without a mark are plain tensors, nodes between those of one operator that was
decomposed, symbolic shapes, tensors for which the program names two specs, and local tensors of another shape than
their spec says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from dtensor_compile.compat.aot.dtensor_observer import locals_hook
from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.dtensor.specs import Spec, canonical_placements
from dtensor_compile.compat.dynamo.observe import node_of
from dtensor_compile.errors import PlanError, SpecTextError
from dtensor_compile.ir.mesh import mesh_text, parse_mesh
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.ops.redistribute import check_local

#: Key of a node's ``meta``: its `Mark`; None where the program says two things of it, or what there is no mark for.
MARK = "dtensor_compile_mark"


class Mark(NamedTuple):
    """What a local tensor is globally: texts of a spec and a mesh, and a shape of plain integers."""

    spec: str
    mesh: str
    shape: tuple[int, ...]


#: While this thread traces for our backend: marks that were made, by the spec and the shape of the local tensor.
_marks: ContextVar[dict[Any, Mark | None] | None] = ContextVar("marks", default=None)


@contextlib.contextmanager
def mark_local_tensors() -> Iterator[None]:
    """While it is entered, nodes that this thread traces get marks."""
    token = _marks.set({})
    try:
        with locals_hook(mark):
            yield
    finally:
        _marks.reset(token)


def mark(local: torch.Tensor, spec: Spec) -> None:
    """Notes in the node of a local tensor what it is globally."""
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
