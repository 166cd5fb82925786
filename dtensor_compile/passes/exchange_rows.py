"""Lookups in a sharded table by indices that differ between ranks send rows, not the table.

    embedding(redistribute(x, S(0) -> R), i)  =  redistribute(own rows of x for the i of all ranks; others are zero,
                                                   P(sum) -> S(0))

    redistribute(gradient of the table, from g and i, P -> S(0))  =  gradient of the own rows, from g and i of all ranks

With parameters sharded over the ranks that split the batch (FSDP), a table of V rows is gathered, though a rank reads B
of them. Correct because each row is on one rank, and the others add zeros to it: exact, but for the sign of a zero.
Sums of a gradient are the same terms in another order. An index outside of the table is an error of the lookup on every
rank.

It pays if the B rows of all ranks are fewer bytes than the table, decided separately for forward and backward; the
indices are gathered for it, one more small collective. It is opt-in (`OPTIONAL`): it assumes that all ranks look up
equally many rows, as nothing in a graph of plain tensors says so.

    before   w = redistribute(x, S(0) -> R); y = embedding(w, i)
    after    k = redistribute(i, S(0) -> R); e = embedding(x, k % 8)
             y = redistribute(where(own(k), e, 0), P(sum) -> S(0))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import value_of
from dtensor_compile.graph.copies import behind_copies, is_same_view, replace
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
from dtensor_compile.graph.rank_uniformity import may_use_sizes, sizes_differ
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.passes.global_tensor import Global

aten = torch.ops.aten

_PUT = aten._unsafe_masked_index_put_accumulate.default
_CONVERT = torch.ops.prims.convert_element_type.default


@dataclass
class LookedUpTable:
    """The table of a redistribution between sharded and replicated over one mesh dim; replicated along the others.

    Attributes:
        node, this: the redistribution.
        mesh_dim, dims, ranks: the mesh dim, the number of mesh dims, and the number of ranks along it.
        source, target: placements along it: ``S(0) -> R`` for the gather, ``P -> S(0)`` for a gradient.
        rows, first: number of rows of this rank's shard, and index of the first one.
    """

    node: torch.fx.Node
    this: RedistributeNode
    mesh_dim: int
    dims: int
    ranks: int
    source: Placement
    target: Placement
    rows: int
    first: int

    @classmethod
    def of(cls, node: torch.fx.Node) -> LookedUpTable | None:
        """The table of a redistribution; None for other redistributions."""
        this = redistribution_of(node)
        layout = parse_mesh(this.mesh)
        coordinate = layout.coordinate(dist.get_rank())
        source, target = (Global.of(spec, this.shape) for spec in (this.source, this.target))
        if source is None or target is None or coordinate is None or len(this.shape) != 2:
            return None
        changed = [i for i, (a, b) in enumerate(zip(source.placements, target.placements)) if a != b]
        if len(changed) != 1 or any(p != Replicate() for i, p in enumerate(source.placements) if i not in changed):
            return None
        i = changed[0]
        was, now, ranks = source.placements[i], target.placements[i], layout.shape[i]
        partial = isinstance(was, Partial) and was.reduce_op in ("sum", "avg")
        if this.shape[0] % ranks or not (was == Shard(0) and now == Replicate() or partial and now == Shard(0)):
            return None
        rows = this.shape[0] // ranks
        return cls(node, this, i, len(layout.shape), ranks, was, now, rows, coordinate[i] * rows)

    def between(
        self, local: torch.fx.Node, source: Placement, target: Placement, shape: tuple[int, ...]
    ) -> RedistributeNode:
        """A redistribution over the same mesh dim."""
        before, after = (
            spec_text([p if dim == self.mesh_dim else Replicate() for dim in range(self.dims)])
            for p in (source, target)
        )
        return RedistributeNode(local, before, after, self.this.mesh, shape)


#: The indices of all ranks, by the node of this rank's indices and the ranks: a mesh and a dim of it.
Gathered = dict[tuple[Any, str, int], torch.fx.Node]


def exchange_rows(graph: torch.fx.Graph) -> list[Decision]:
    """Exchanges rows in place of tables in `graph`, assuming that every rank looks up equally many."""
    if not may_use_sizes():
        return list(_left(graph))
    gathered: Gathered = {}
    found = []
    for node in redistributions(graph):
        table = LookedUpTable.of(node)
        if table is not None:
            found.append(_look_up(table, gathered) if table.target == Replicate() else _reduce(table, gathered))
    return [decision for decision in found if decision is not None]


def _left(graph: torch.fx.Graph) -> Iterator[Decision]:
    """Decisions for the tables that are still gathered because shards are uneven somewhere in the graph."""
    for node in redistributions(graph):
        table = LookedUpTable.of(node)
        with sizes_differ(False):  # nothing is decided by them
            lookups = _lookups(node) if table is not None else []
        if table is not None and lookups:
            reason, text = (
                "some shards of the graph are uneven, and ranks may look up different numbers of rows",
                str(table.this),
            )
            sent = redistribution_cost(table.this, value_of(node).element_size()).bytes
            yield Decision("exchange_rows", source_line(node), reason, text, text, left_alone=True, bytes=sent)


# ---- forward -------------------------------------------------------------------------------------------------------


def _look_up(table: LookedUpTable, gathered: Gathered) -> Decision | None:
    node, this = table.node, table.this
    lookups = _lookups(node)
    counts = [_count(lookup.args[1]) for lookup in lookups]
    if not counts or not all(counts):
        return None
    moves = [table.between(this.local, Partial("sum"), Shard(0), (table.ranks * n, this.shape[1])) for n in counts]
    wanted = {
        lookup.args[1]: n
        for lookup, n in zip(lookups, counts)
        if _found(table, lookup.args[1], gathered, lookup) is None
    }
    after = _sent(table, wanted) + sum(redistribution_cost(move, value_of(node).element_size()).bytes for move in moves)
    if after >= cost_of([node]).bytes:
        return None
    where, before = source_line(node), cost_of([node])
    for lookup, move in zip(lookups, moves):
        all_indices = _all_indices(table, lookup.args[1], gathered, like=node, before=lookup)
        own, rows = _own(table, all_indices, lookup)
        found = _call(lookup, aten.embedding.default, this.local, rows, *lookup.args[2:])
        found = _call(
            lookup, aten.where.self, _call(lookup, aten.unsqueeze.default, own, -1), found, _zero(lookup, found)
        )
        rows = redistribute(move._replace(local=found), like=node, before=lookup)
        result = _call(lookup, aten.view.default, rows, list(value_of(lookup).shape))
        replace(lookup, result)
    return _decision(table, where, f"{after:,} bytes of rows and indices are sent and not {before}")


def _lookups(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The lookups that read a table; empty if anything else reads it."""
    found: list[torch.fx.Node] = []
    for user in node.users:
        if is_same_view(user):
            more = _lookups(user)
            if not more:
                return []
            found += more
        elif user.target is aten.embedding.default and user.args[0] is node and user.args[1] is not node:
            found.append(user)
        else:
            return []
    return found


# ---- backward ------------------------------------------------------------------------------------------------------


def _reduce(table: LookedUpTable, gathered: Gathered) -> Decision | None:
    node, this = table.node, table.this
    made = behind_copies(this.local)
    dtype = None
    if isinstance(made, torch.fx.Node) and made.target is _CONVERT:
        dtype, made = made.args[1], behind_copies(made.args[0])
    terms = Terms.of(made)
    if terms is None or not all(runs_when(n) == runs_when(node) for n in (made, this.local)):
        return None
    values, indices = terms.values, terms.indices
    n = _count(indices)
    if not n or value_of(values).numel() != n * this.shape[1]:
        return None
    whole = (table.ranks * n, this.shape[1])
    wanted = {indices: n} if _found(table, indices, gathered, node) is None else {}
    after = (
        _sent(table, wanted)
        + redistribution_cost(
            table.between(values, Shard(0), Replicate(), whole), value_of(values).element_size()
        ).bytes
    )
    before = cost_of([node])
    if after >= before.bytes:
        return None
    where = source_line(node)
    all_indices = _all_indices(table, indices, gathered, like=node, before=node)
    if (kept := terms.mask(node)) is not None:
        values = _call(node, aten.where.self, kept, values, _zero(node, values))
    flat = _call(node, aten.reshape.default, values, [n, this.shape[1]])
    values = redistribute(table.between(flat, Shard(0), Replicate(), whole), like=node, before=node)
    own, rows = _own(table, all_indices, node)
    values = _call(node, aten.where.self, _call(node, aten.unsqueeze.default, own, -1), values, _zero(node, values))
    shard = zeros([table.rows, this.shape[1]], values.meta["val"], like=node, before=node)
    result = _call(node, aten.index_put.default, shard, [rows], values, True)
    if table.source == Partial("avg"):
        result = _call(node, aten.div.Tensor, result, table.ranks)
    if value_of(result).dtype != value_of(node).dtype:
        result = _call(node, _CONVERT, result, dtype or value_of(node).dtype)
    replace(node, result)
    return _decision(table, where, f"{after:,} bytes of gradients and indices are sent and not {before}")


@dataclass
class Terms:
    """The terms whose sum is the gradient of a table. Before Inductor's decompositions that is one operator; after
    them, values are put into zeros under a mask.

    Attributes:
        values: the added values, one row for each index.
        indices: the rows that they are added to.
        kept: mask of the rows that are added; None for all.
        padding: the row to which nothing is added.
    """

    values: torch.fx.Node
    indices: torch.fx.Node
    kept: torch.fx.Node | None = None
    padding: int = -1

    @classmethod
    def of(cls, made: Any) -> Terms | None:
        """The terms of a gradient made by node `made`; None for an operator that is not known."""
        if not isinstance(made, torch.fx.Node):
            return None
        args: tuple[Any, ...] = made.args
        if (
            made.target is aten.embedding_dense_backward.default and not args[4]
        ):  # by frequency: what all ranks look up counts
            return cls(args[0], args[1], padding=args[3])
        if made.target is _PUT and len(args[2]) == 1 and args[0].target is aten.full.default and args[0].args[1] == 0:
            return cls(args[3], args[2][0], kept=args[1])
        return None

    def mask(self, before: torch.fx.Node) -> torch.fx.Node | None:
        """Mask of the values that are added, one element for each row; None for all."""
        if self.padding == -1:
            return self.kept
        return _call(before, aten.unsqueeze.default, _call(before, aten.ne.Scalar, self.indices, self.padding), -1)


# ---- both ----------------------------------------------------------------------------------------------------------


def _count(indices: Any) -> int:
    """Number of indices; 0 if it is unknown, or there are none."""
    shape = value_of(indices).shape if isinstance(indices, torch.fx.Node) else ()
    return math.prod(shape) if all(type(size) is int for size in shape) else 0


def _sent(table: LookedUpTable, counts: dict[Any, int]) -> int:
    """Bytes sent to gather indices."""
    each = (
        (table.between(i, Shard(0), Replicate(), (table.ranks * n,)), value_of(i).element_size())
        for i, n in counts.items()
    )
    return sum(redistribution_cost(move, size).bytes for move, size in each)


def _found(table: LookedUpTable, indices: Any, gathered: Gathered, before: torch.fx.Node) -> torch.fx.Node | None:
    """The indices of all ranks, if they have been gathered before a node."""
    found = gathered.get((indices, table.this.mesh, table.mesh_dim))
    return found if found is not None and found < before else None


def _all_indices(
    table: LookedUpTable, indices: Any, gathered: Gathered, *, like: torch.fx.Node, before: torch.fx.Node
) -> torch.fx.Node:
    """The indices of all ranks, concatenated."""
    found = _found(table, indices, gathered, before)
    if found is None:
        n = _count(indices)
        flat = _call(before, aten.reshape.default, indices, [n])
        whole = table.between(flat, Shard(0), Replicate(), (table.ranks * n,))
        found = gathered[indices, table.this.mesh, table.mesh_dim] = redistribute(whole, like=like, before=before)
    return found


def _own(table: LookedUpTable, indices: torch.fx.Node, before: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
    """A mask of the indices of this rank's rows, and the position of each row in its shard.

    Indices outside of the table stay as they are, so that the lookup sees them.
    """
    shifted = _call(before, aten.sub.Tensor, indices, table.first)
    below, above = (
        _call(before, target, shifted, bound) for target, bound in ((aten.ge.Scalar, 0), (aten.lt.Scalar, table.rows))
    )
    own = _call(before, aten.logical_and.default, below, above)
    above = _call(before, aten.lt.Scalar, indices, table.this.shape[0])
    inside = _call(before, aten.logical_and.default, _call(before, aten.ge.Scalar, indices, 0), above)
    within = _call(before, aten.remainder.Scalar, indices, table.rows)
    return own, _call(before, aten.where.self, inside, within, indices)


def _call(before: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    return call_before(target, args, kwargs, like=before, before=before)


def _zero(before: torch.fx.Node, like: torch.fx.Node) -> torch.fx.Node:
    return zeros([], like.meta["val"], like=before, before=before)


def _decision(table: LookedUpTable, where: str, reason: str) -> Decision:
    text = str(table.this)
    return Decision("exchange_rows", where, reason, text, f"{text} of rows")
