"""The scope in which redistributions become ``dtensor_compile::redistribute`` nodes.

torch changes placements in one function, for explicit and implicit redistributions, forward and backward. While our
backend traces, calls to it become the operator. Changes that the operator does not support are traced through torch's
own code, and the resulting nodes record the reason (`HANDED_BACK`):

- A masked partial (row-wise embedding) has to be masked before it is summed. The mask is applied as a local operator,
  which leaves an ordinary partial sum. torch's own code creates the mask, without communication.
- Placements of a user-defined class, changes that torch refuses, and local tensors that do not match their spec
  (torch's rule for a convolution over a sharded image calls the gradient of its input replicated): torch's own code
  determines the result.
- Meshes created by torch over a permuted list of ranks: their meaning depends on the order of torch's own steps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
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
from dtensor_compile.compat.dynamo.observers.observe import forcing_operator, newest_node, nodes_since
from dtensor_compile.errors import PlanError, SpecTextError
from dtensor_compile.graph.global_annotations import mark_node
from dtensor_compile.graph.nodes import FORCED_BY, HANDED_BACK
from dtensor_compile.ir.mesh import groups_in_mesh_order, mesh_text, parse_mesh
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.ops.redistribute import check_local, plan_of, redistribute_op
from dtensor_compile.ops.redistribute_together import redistribute_together, redistribute_together_op


class HandedBack(NamedTuple):
    """Reason why torch's own code redistributes a tensor; `number` identifies the redistribution."""

    reason: str
    number: int


_numbers = itertools.count()


@contextlib.contextmanager
def capture_redistributions() -> Iterator[None]:
    """While active, redistributions that this thread traces are recorded as operators."""
    with redistribute_hook(emit_redistribution, emit_redistributions):
        yield


def emit_redistribution(
    local: torch.Tensor, source: Spec, target: Spec, stock: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """The local tensor in the target spec, by the operator if it supports the change, otherwise by `stock`."""
    mark_node(local, source)
    mesh = compat_mesh.real_mesh(source.mesh)
    if not compat_mesh.is_member(mesh):
        return stock()  # this rank has no part of the tensor, and sends nothing
    return _emit(local, source, target, _change(local, source, target), stock)


def _emit(
    local: torch.Tensor,
    source: Spec,
    target: Spec,
    change: _Operator | _ToMask | str,
    stock: Callable[[], torch.Tensor],
) -> torch.Tensor:
    if isinstance(change, str):
        return _hand_back(stock, change)
    if isinstance(change, _ToMask):
        return _emit_to_mask(local, source, target, change, stock)
    for p in change.masks:
        local = apply_mask(p, local)
    if not change.is_needed:
        return local
    result = redistribute_op(local, *change.arguments)
    note_origin()
    return result


def emit_redistributions(
    locals_: Sequence[torch.Tensor], sources: Sequence[Spec], targets: Sequence[Spec]
) -> list[torch.Tensor]:
    """The local tensors in the target specs, by one operator for all changes that the operator supports, the others
    one by one."""
    results: list[torch.Tensor] = []
    together: list[tuple[int, _Operator]] = []
    for i, (local, source, target) in enumerate(zip(locals_, sources, targets, strict=True)):
        mark_node(local, source)
        stock = functools.partial(stock_redistribute_local, local, source, target)
        if not compat_mesh.is_member(compat_mesh.real_mesh(source.mesh)):
            results.append(stock())
            continue
        change = _change(local, source, target)
        if isinstance(change, _Operator) and change.is_needed and not change.masks:
            together.append((i, change))
            results.append(local)
        else:
            results.append(_emit(local, source, target, change, stock))
    if together:
        made = redistribute_together([results[i] for i, _ in together], [change.arguments for _, change in together])
        note_origin()
        for (i, _), result in zip(together, made, strict=True):
            results[i] = result
    return results


class _ToMask(NamedTuple):
    """A change to placements with a mask."""

    before: tuple[Placement, ...]
    after: tuple[Placement, ...]


class _Operator(NamedTuple):
    """Arguments of the operator.

    Attributes:
        masks: masks that are applied before, at most one.
        specs: texts of source and target.
        mesh: its text.
        shape: of the global tensor.
        is_needed: False if the local tensors are already those of the target once the mask is applied.
    """

    masks: list[MaskPartial]
    specs: tuple[str, str]
    mesh: str
    shape: torch.Size
    is_needed: bool

    @property
    def arguments(self) -> tuple[str, str, str, torch.Size]:
        return (*self.specs, self.mesh, self.shape)


def _change(local: torch.Tensor, source: Spec, target: Spec) -> _Operator | _ToMask | str:
    """The arguments with which a change of specs is traced; a text is the reason for leaving it to torch's own code."""
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
        sums = any(isinstance(b, Partial) and not isinstance(b, MaskPartial) for b in before)
        return "a partial gradient is to have the mask of a lookup" if sums else _ToMask(before, after)
    masks = [p for i, p in enumerate(before) if isinstance(p, MaskPartial) and mesh.size(i) > 1]
    if len(masks) > 1:  # a mesh dim with one rank has none, since that rank has every row
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
    """The call of the operator that changes placements, if there is a plan and `local` matches its spec."""
    try:
        specs = spec_text(placements[0]), spec_text(placements[1])
        text = mesh_text(mesh)
        layout = parse_mesh(text)
        needed = plan_of(*specs, layout, shape, local.element_size(), bounded=False)
        check_local(local, specs[0], layout, mesh.get_coordinate() or (), shape)
    except (SpecTextError, PlanError) as error:
        return str(error)
    if not groups_in_mesh_order(mesh, layout):
        return f"process groups of mesh {text} have another order of ranks than the mesh"
    return _Operator(masks, specs, text, shape, bool(needed))


def _hand_back(stock: Callable[[], torch.Tensor], reason: str) -> torch.Tensor:
    """Result of `stock`; nodes that it adds to the graph traced on this thread record why torch redistributes."""
    before = newest_node()
    result = stock()
    this = HandedBack(reason, next(_numbers))
    for node in nodes_since(before):
        node.meta.setdefault(HANDED_BACK, this)
    return result


def note_origin() -> None:
    """Records on the last traced node which operator forced the redistribution, for readers of the graph."""
    node = newest_node()
    if node is not None and node.target is operator.getitem:
        (node,) = node.all_input_nodes
    if node is not None and node.target in {redistribute_op, redistribute_together_op}:
        node.meta[FORCED_BY] = forcing_operator()


def _emit_to_mask(
    local: torch.Tensor,
    source: Spec,
    target: Spec,
    change: _ToMask,
    stock: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Redistributes the indices of a row-wise lookup: replicates them, then lets torch create the mask, without
    communication.
    """
    if all(a == b or isinstance(b, MaskPartial) and isinstance(a, Replicate) for a, b in zip(*change)):
        return stock()  # a mask alone, without communication
    assert source.tensor_meta is not None
    replicated = tuple(Replicate() if isinstance(p, MaskPartial) else p for p in change.after)
    middle = make_spec(source.mesh, replicated, source.tensor_meta.shape, source.tensor_meta.dtype)
    local = emit_redistribution(local, source, middle, lambda: stock_redistribute_local(local, source, middle))
    return stock_redistribute_local(local, middle, target)
