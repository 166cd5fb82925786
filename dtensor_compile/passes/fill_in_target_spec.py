"""Fills a redistributed constant tensor directly in the target spec.

    redistribute(full(n), A -> B)  =  full(n)

Correct because all elements are equal; if A is a partial sum, the number has to be zero. Only tensors that a mark
identifies as local tensors of a DTensor count: a local tensor that a program makes may hold another number on each
rank.

It always pays: nothing is sent, and no tensor is made that is larger than the one read.

    before   z = full([2, 6], 0); y = redistribute(z, S(0) -> R)
    after    y = full([4, 6], 0)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.dtensor.specs import Partial
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.copies import behind_copies, replace
from dtensor_compile.graph.nodes import call_before, redistribution_of, redistributions, source_line
from dtensor_compile.graph.rank_uniformity import mark_of
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.passes.global_tensor import Global

aten = torch.ops.aten

#: Operators that make tensors filled with one number: position of the number among the arguments, or the number.
_FILLED: dict[Any, tuple[int | None, int]] = {
    aten.full.default: (1, 0),
    aten.full_like.default: (1, 0),
    aten.new_full.default: (2, 0),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), (None, 0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), (None, 1)),
}


def make_in_place(graph: torch.fx.Graph) -> list[Decision]:
    """Makes redistributed constant tensors in `graph` in the spec in which they are read."""
    return [made for node in redistributions(graph) if (made := _make(node)) is not None]


def _make(node: torch.fx.Node) -> Decision | None:
    this = redistribution_of(node)
    local = behind_copies(this.local)
    mark = mark_of(local)
    if local.target not in _FILLED or mark is None or (mark.spec, mark.mesh) != (this.source, this.mesh):
        return None
    place, number = _FILLED[local.target]
    value: Any = number if place is None else local.args[place]
    source, target = (Global.of(spec, this.shape) for spec in (this.source, this.target))
    layout = parse_mesh(this.mesh)
    coordinate = layout.coordinate(dist.get_rank())
    if source is None or target is None or coordinate is None or not isinstance(value, (int, float)):
        return None
    if any(isinstance(p, Partial) for g in (source, target) for p in g.placements) and value != 0:
        return None
    made = node.meta["val"]
    options = {"dtype": made.dtype, "layout": made.layout, "device": made.device, "pin_memory": False}
    where = source_line(node)
    new = call_before(
        aten.full.default, (target.local_shape(layout, coordinate), value), options, like=node, before=node
    )
    if not replace(node, new):
        return None
    return Decision("make_in_place", where, f"each element is {value}", str(this), f"made as {this.target}")
