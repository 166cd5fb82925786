"""The scope in which redistributions become ``dtensor_compile::redistribute`` nodes.

torch moves tensors between placements in one function, for explicit and implicit redistributions, forward and backward.
While our backend traces, calls to it become the operator. What the operator does not speak of stays with torch, in the
graph all the same, and the nodes that torch makes for it say why (`HANDED_BACK`):

- A masked partial (row-wise embedding) owes a mask before it is summed. The mask is applied as a local operator, what
  is left is an ordinary partial sum. Making the mask sends nothing and is torch's own code.
- Placements of a class made by the user, changes that torch refuses, and local tensors that are not what their spec
  says (torch's rule for a convolution over a sharded image calls the gradient of its input replicated): there torch's
  own code decides what comes out.
- Meshes over a permuted list of ranks that torch made: what they mean depends on the order of torch's own steps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.dtensor.specs import (
    MaskPartial,
    Partial,
    Placement,
    Replicate,
    Spec,
    apply_mask,
    canonical_placements,
    make_spec,
    redistribute_hook,
    stock_redistribute_local,
)
from dtensor_compile.compat.dynamo.observe import forcing_operator, newest_node, nodes_since
from dtensor_compile.errors import PlanError, SpecTextError
from dtensor_compile.graph.global_annotations import mark
from dtensor_compile.graph.nodes import FORCED_BY, HANDED_BACK
from dtensor_compile.ir.mesh import groups_in_mesh_order, mesh_text, parse_mesh
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.ops.redistribute import check_local, plan_of, redistribute_op


class HandedBack(NamedTuple):
    """Why torch's own code redistributes a tensor; `number` tells redistributions apart."""

    reason: str
    number: int


_numbers = itertools.count()


@contextlib.contextmanager
def capture_redistributions() -> Iterator[None]:
    """While it is entered, redistributions that this thread traces are recorded as operators."""
    with redistribute_hook(emit_redistribution):
        yield


def emit_redistribution(
    local: torch.Tensor, source: Spec, target: Spec, stock: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """The local tensor in the target spec: by the operator where it speaks of the change, else by `stock`."""
    mark(local, source)
    mesh = compat_mesh.real_mesh(source.mesh)
    if not compat_mesh.is_member(mesh):
        return stock()  # this rank has no part of the tensor, and sends nothing
    change = _change(local, source, target)
    if isinstance(change, str):
        return _hand_back(stock, change)
    if isinstance(change, _ToMask):
        return _emit_to_mask(local, source, target, change, stock)
    for p in change.masks:
        local = apply_mask(p, local)
    if not change.is_needed:
        return local
    result = redistribute_op(local, *change.specs, change.mesh, change.shape)
    note_origin()
    return result


class _ToMask(NamedTuple):
    """A change to placements with a mask."""

    before: tuple[Placement, ...]
    after: tuple[Placement, ...]


class _Operator(NamedTuple):
    """What the operator is called with.

    Attributes:
        masks: those that are applied before, at most one.
        specs: texts of source and target.
        mesh: its text.
        shape: of the global tensor.
        is_needed: False where the local tensors are those of the target, once the mask is applied.
    """

    masks: list[MaskPartial]
    specs: tuple[str, str]
    mesh: str
    shape: torch.Size
    is_needed: bool


def _change(local: torch.Tensor, source: Spec, target: Spec) -> _Operator | _ToMask | str:
    """What becomes of a change of specs; a text says why torch's own code makes it."""
    mesh = compat_mesh.real_mesh(source.mesh)
    if source.tensor_meta is None:
        return "its spec has no global shape"
    if compat_mesh.real_mesh(target.mesh) != mesh:
        return "source and target are on different meshes"
    before, after = canonical_placements(source), canonical_placements(target)
    if len({p.reduce_op for p in (*before, *after) if isinstance(p, Partial)}) > 1:
        return "it is partial in several reductions"  # which torch refuses for most
    if any(isinstance(b, Partial) and not isinstance(a, (Partial, Replicate)) for a, b in zip(before, after)):
        return "a shard is to become partial"  # which torch refuses for most
    if any(isinstance(p, MaskPartial) for p in after):
        return _ToMask(before, after)
    masks = [p for i, p in enumerate(before) if isinstance(p, MaskPartial) and mesh.size(i) > 1]
    if len(masks) > 1:  # along a mesh dim of one rank there is none: that rank has every row
        return "it is partial under the masks of several mesh dims"
    before = tuple(Partial(p.reduce_op) if isinstance(p, MaskPartial) else p for p in before)
    return _operator(local, mesh, (before, after), source.tensor_meta.shape, masks)


def _operator(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[tuple[Placement, ...], tuple[Placement, ...]],
    shape: torch.Size,
    masks: list[MaskPartial],
) -> _Operator | str:
    """The call of the operator that changes placements, if there is a plan and `local` is what its spec says."""
    try:
        specs = spec_text(placements[0]), spec_text(placements[1])
        text = mesh_text(mesh)
        layout = parse_mesh(text)
        needed = plan_of(*specs, layout, shape, local.element_size(), bounded=False)
        check_local(local, specs[0], layout, mesh.get_coordinate() or (), shape)
    except (SpecTextError, PlanError) as error:
        return str(error)
    if not groups_in_mesh_order(mesh, layout):
        return f"process groups of mesh {text} are in another order of ranks than the mesh"
    return _Operator(masks, specs, text, shape, bool(needed))


def _hand_back(stock: Callable[[], torch.Tensor], reason: str) -> torch.Tensor:
    """What `stock` gives; the nodes that it makes in the graph that this thread traces say why torch redistributes."""
    before = newest_node()
    result = stock()
    this = HandedBack(reason, next(_numbers))
    for node in nodes_since(before):
        node.meta.setdefault(HANDED_BACK, this)
    return result


def note_origin() -> None:
    """Notes in the node that was just traced which operator forced the redistribution, for those who read the graph."""
    node = newest_node()
    if node is not None and node.target is redistribute_op:
        node.meta[FORCED_BY] = forcing_operator()


def _emit_to_mask(
    local: torch.Tensor,
    source: Spec,
    target: Spec,
    change: _ToMask,
    stock: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Indices on their way into a row-wise lookup: replicate them, then let torch make the mask, which sends
    nothing.
    """
    if all(a == b or isinstance(b, MaskPartial) and isinstance(a, Replicate) for a, b in zip(*change)):
        return stock()  # a mask alone, which sends nothing
    assert source.tensor_meta is not None
    replicated = tuple(Replicate() if isinstance(p, MaskPartial) else p for p in change.after)
    middle = make_spec(source.mesh, replicated, source.tensor_meta.shape, source.tensor_meta.dtype)
    local = emit_redistribution(local, source, middle, lambda: stock_redistribute_local(local, source, middle))
    return stock_redistribute_local(local, middle, target)
