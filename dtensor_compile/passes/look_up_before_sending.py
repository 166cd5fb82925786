"""Looks up rows of a sharded tensor on the ranks that have them, and sends only those.

    lookup(redistribute(x, S(d) -> R), rows of d)  =  redistribute(lookup(x, own rows; others are zero), P(sum) -> R)

Correct because each row is on one rank, and the others add zeros to it: exact, but for the sign of a zero. A mark has
to say that indices are the same on every rank of the mesh dim, or, for bounds of a slice, a mark of the result.
`move_redistributions` handles lookups along other dims than the sharded one.

It pays if fewer than half of the rows are read: the lookup's result is reduced, the tensor is not gathered.

    before   w = redistribute(x, S(0) -> R); y = embedding(w, i)
    after    k = sub(i, 2); m = (k < 0) | (k >= 2); e = embedding(x, where(m, 0, k))
             y = redistribute(where(m, 0, e), P(sum) -> R)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.dtensor.specs import Partial, Replicate, Shard
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import const_arg, value_of
from dtensor_compile.graph.copies import replace
from dtensor_compile.graph.nodes import (
    RedistributeNode,
    call_before,
    cost_of,
    redistribute,
    redistribution_cost,
    redistribution_of,
    redistributions,
    runs_when,
    source_line,
    zeros,
)
from dtensor_compile.graph.rank_uniformity import mark_of, may_use_sizes
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.passes.global_tensor import Global

aten = torch.ops.aten


def look_up_before_sending(graph: torch.fx.Graph) -> list[Decision]:
    """Moves lookups in `graph` in front of gathers of the indexed dim."""
    if not may_use_sizes():
        return []
    return [made for node in redistributions(graph) if (made := _look_up(node)) is not None]


def _look_up(node: torch.fx.Node) -> Decision | None:
    this = redistribution_of(node)
    layout = parse_mesh(this.mesh)
    coordinate = layout.coordinate(dist.get_rank())
    source, target = (Global.of(spec, this.shape) for spec in (this.source, this.target))
    if (
        source is None
        or target is None
        or coordinate is None
        or not all(runs_when(user) == runs_when(node) for user in node.users)
    ):
        return None
    changed = [i for i, (a, b) in enumerate(zip(source.placements, target.placements)) if a != b]
    if len(changed) != 1 or value_of(node).dtype == torch.bool:
        return None
    i = changed[0]
    gathered = source.placements[i]
    if not isinstance(gathered, Shard) or target.placements[i] != Replicate() or target.shards(gathered.dim):
        return None
    users = list(node.users)
    dim, n = gathered.dim, layout.shape[i]
    if not source.is_even(layout) or not all(_looks_up(user, node, dim, this.mesh) for user in users):
        return None
    owing = spec_text([Partial("sum") if k == i else Replicate() for k in range(len(layout.shape))])
    if any(p != Replicate() for k, p in enumerate(target.placements) if k != i):
        return None
    size = this.shape[dim] // n
    first = coordinate[i] * size
    moves = [
        RedistributeNode(this.local, owing, spec_text(target.placements), this.mesh, tuple(value_of(user).shape))
        for user in users
    ]
    each = [redistribution_cost(move, value_of(node).element_size()) for move in moves]
    before = cost_of([node])
    if sum(c.collectives for c in each) > before.collectives or sum(c.bytes for c in each) >= before.bytes:
        return None
    where, after = source_line(node), sum(c.bytes for c in each)
    for user, move in zip(users, moves):
        own = _own(user, this.local, dim, first, size)
        replace(user, redistribute(move._replace(local=own), like=node, before=user))
    return Decision(
        "look_up_before_sending",
        where,
        f"{after:,} bytes of rows are sent and not {before}",
        str(this),
        f"{owing}->R of rows",
    )


def _looks_up(user: torch.fx.Node, node: torch.fx.Node, dim: int, mesh: str) -> bool:
    """Whether `user` looks up rows along `dim` of `node` by indices that are the same on all ranks."""
    args = user.args
    if not args or args[0] is not node or sum(x is node for x in user.all_input_nodes) != 1 or user.kwargs:
        return False
    if user.target is aten.embedding.default:
        return dim == 0 and _is_same(args[1], mesh)
    if user.target is aten.index_select.default:
        return const_arg(user, 1, int) % value_of(node).dim() == dim and _is_same(args[2], mesh)
    if user.target in (aten.slice.Tensor, aten.select.int):
        at = const_arg(user, 1, int) % value_of(node).dim() if len(args) > 1 else 0
        numbers = all(type(x) is int for x in args[1:])
        step = args[4] if len(args) > 4 else 1
        return at == dim and numbers and bool(step == 1) and _is_same(user, mesh)
    return False


def _is_same(node: Any, mesh: str) -> bool:
    """Whether a node is known to be the same on all ranks."""
    mark = mark_of(node)
    form = Global.of(mark.spec, mark.shape) if mark is not None and mark.mesh == mesh else None
    return form is not None and all(p == Replicate() for p in form.placements)


def _own(user: torch.fx.Node, local: torch.fx.Node, dim: int, first: int, size: int) -> torch.fx.Node:
    """The result of `user` on `local`, which has the rows `first` to ``first + size``, with zeros for other rows."""

    def make(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return call_before(target, args, kwargs, like=user, before=user)

    def zero_like(node: torch.fx.Node) -> torch.fx.Node:
        return zeros([], node.meta["val"], like=user, before=user)

    args: tuple[Any, ...] = user.args
    if user.target in (aten.slice.Tensor, aten.select.int):
        start, end = _rows(user, dim)
        low = min(max(start, first), first + size)
        high = min(max(end, low), first + size)
        pads = (low - start, end - high) if high > low else (end - start, 0)
        part = make(aten.slice.Tensor, local, dim, low - first, high - first)
        part = make(aten.constant_pad_nd.default, part, [0, 0] * (value_of(local).dim() - 1 - dim) + list(pads), 0)
        return make(aten.squeeze.dim, part, dim) if user.target is aten.select.int else part
    place = 1 if user.target is aten.embedding.default else 2
    rows = make(aten.sub.Tensor, args[place], first)
    others = make(aten.logical_or.default, make(aten.lt.Scalar, rows, 0), make(aten.ge.Scalar, rows, size))
    rows = make(aten.where.self, others, zero_like(rows), rows)
    found = make(user.target, *(local if k == 0 else rows if k == place else a for k, a in enumerate(args)))
    for _ in range(value_of(local).dim() - 1 - dim):
        others = make(aten.unsqueeze.default, others, -1)
    return make(aten.where.self, others, zero_like(found), found)


def _rows(user: torch.fx.Node, dim: int) -> tuple[int, int]:
    """First and last row of a slice, or of the one that is selected."""
    args: tuple[Any, ...] = user.args
    size = value_of(args[0]).shape[dim]
    if user.target is aten.select.int:
        return args[2] % size, args[2] % size + 1
    start, end = (args[2] if len(args) > 2 else 0), (args[3] if len(args) > 3 else size)
    start, end = (min(max(x + size if x < 0 else x, 0), size) for x in (start, end))
    return start, max(start, end)
