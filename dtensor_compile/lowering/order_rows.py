"""Keeps gathered rows in the order of the collective, without a copy between a gather and a matmul.

In: a joint graph with redistribute nodes. Out: the same values, with the permutations at other places. A gather of
``S(1)`` returns its chunks one after the other, (n, B, S/n, D), whereas its readers need (B, S, D). With X' the rows of
X in the order of the chunks, P that permutation, f any operator that acts row by row:

    (P X) W = P (X W)        f(P X) = P f(X)        (P X)^T (P Y) = X^T Y        P^-1 P X = X

So the permutation moves behind matmuls and elementwise operators until it is undone by that of a reduce_scatter, whose
input has the same order, or reaches a copy that is made anyway (the transposition of heads), into which it is merged.
Matmuls of gradients and activations sum over rows: both sides have them in the same order. Rows are bitwise the same;
sums over rows have another order.

    before   g = redistribute(x, S(1)->R, [B, S, D])
             y = mm(view(g, [B S, D]), w); z = redistribute(view(y), P(sum)->S(1))
    after    g = redistribute(x[None], S(0)->R, [n, B, S/n, D])
             y = mm(view(g, [B S, D]), w); z = redistribute(view(y), P(sum)->S(0))

It pays if standalone copies write fewer bytes afterwards (`graph/extra_copies.py`); else nothing changes. Left alone:
symbolic and uneven sizes, with a decision each, dims that another mesh dim shards too, and gathers of the last dim. If
other tensors of the graph are sharded unevenly, only rows and copies count whose sizes all ranks know to be the same
(`nodes_of_equal_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from dtensor_compile.compat.aot.fx import copy_of_graph, put_back
from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard, StridedShard
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import node_arg, value_of
from dtensor_compile.graph.extra_copies import bytes_of, is_outside, is_standalone, readers
from dtensor_compile.graph.nodes import has_even_shards, redistribution_of, redistributions, source_line
from dtensor_compile.graph.operator_traits import RESHAPES, VIEWS, transposes
from dtensor_compile.graph.rank_uniformity import nodes_of_equal_sizes
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.lowering.chunk_order import ChunkOrder, Rows, is_elementwise
from dtensor_compile.ops.redistribute import redistribute_op

aten = torch.ops.aten


def order_rows(graph: torch.fx.Graph) -> list[Decision]:
    """Moves the permutations of gathers and reduce_scatters in `graph`."""
    decisions = list(rows_left(graph))
    for rows in dict.fromkeys(found for node in redistributions(graph) if (found := rows_of(node)) is not None):
        nodes, equal = set(graph.nodes), nodes_of_equal_sizes(graph)

        def counts(node: torch.fx.Node) -> bool:
            return node in equal or node not in nodes  # noqa: B023 - what is made new is made of rows

        before, saved = _copied(graph, counts), copy_of_graph(graph)
        made = _Order(graph, rows, equal).run()
        if _copied(graph, counts) < before:
            decisions += made
        else:
            put_back(graph, saved)
    return decisions


def rows_left(graph: torch.fx.Graph, because: str = "") -> Iterator[Decision]:
    """A decision for each gather and scatter of rows that is left alone, with the bytes that are copied for it.

    Args:
        because: the reason to leave all of them alone; empty if only those of uneven or symbolic sizes are.
    """
    for node in redistributions(graph):
        this = redistribution_of(node)
        _, dim = moved(this.source, this.target, parse_mesh(this.mesh).shape) or (0, 0)
        reason = because or why_sizes_do_not_fit(node)
        if 0 < dim < len(this.shape) - 1 and reason and (copied := _copied_for(node)):
            reason = f"its rows are copied into the order of the program: {reason}"
            yield Decision("order_rows", source_line(node), reason, str(this), str(this), left_alone=True, bytes=copied)


def why_sizes_do_not_fit(node: torch.fx.Node) -> str:
    """The reason why the sizes of a redistribution prevent another layout; empty if they do not."""
    shape = [str(size) if isinstance(size, torch.fx.Node) else size for size in redistribution_of(node).shape]
    if not all(isinstance(size, int) for size in (*shape, *value_of(node).shape)):
        return "sizes are symbolic"
    return "" if has_even_shards(node) else f"{shape} is cut unevenly, and ranks have different sizes"


def rows_of(node: torch.fx.Node) -> Rows | None:
    """The rows of a redistribution that gathers or scatters them; None for any other."""
    this, value = redistribution_of(node), node.meta["val"]
    if why_sizes_do_not_fit(node):
        return None
    mesh_dim, dim = moved(this.source, this.target, parse_mesh(this.mesh).shape) or (0, 0)
    n = parse_mesh(this.mesh).shape[mesh_dim]
    if dim == 0 or dim == len(this.shape) - 1 or this.shape[dim] % n:
        return None
    whole = value if _gathers(this.source, mesh_dim) else this.local.meta["val"]
    lead, length = math.prod(whole.shape[:dim]), this.shape[dim] // n
    return Rows(lead, n, length) if lead > 1 and whole.numel() else None


def _gathers(source: str, mesh_dim: int) -> bool:
    return isinstance(parse_spec(source)[mesh_dim], Shard)


def moved(source: str, target: str, mesh_shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Mesh dim and tensor dim of a redistribution that is only a gather ``S(d) -> R`` or a reduce_scatter ``P ->
    S(d)``.
    """
    before, after = parse_spec(source), parse_spec(target)
    changed = [i for i, (a, b) in enumerate(zip(before, after)) if a != b and mesh_shape[i] > 1]
    if len(changed) != 1:
        return None
    (i,) = changed
    was, now = before[i], after[i]
    if type(was) is Shard and isinstance(now, Replicate):
        dim = was.dim
    elif isinstance(was, Partial) and type(now) is Shard:
        dim = now.dim
    else:
        return None
    others = [p for j, p in enumerate(before) if j != i]
    if any(isinstance(p, StridedShard) or isinstance(p, Shard) and p.dim == dim for p in others):
        return None
    return i, dim


def _copied(graph: torch.fx.Graph, counts: Callable[[torch.fx.Node], bool]) -> int:
    """Bytes of standalone copies, including those of lowered gathers and reduce_scatters, for the nodes that count."""
    total = 0
    for node in filter(counts, graph.nodes):
        if is_standalone(node):
            total += bytes_of(node)
        elif node.target is redistribute_op and not _sends_in_order(node):
            total += _copied_for(node)
    return total


def _copied_for(node: torch.fx.Node) -> int:
    """Bytes of the standalone copy in the lowered form of a gather or a reduce_scatter."""
    local = redistribution_of(node).local
    gathers = bytes_of(node) > bytes_of(local)
    if gathers and any(map(is_outside, readers(node))):
        return bytes_of(node)
    return bytes_of(local) if not gathers and is_outside(_written_by(local)) else 0


def _sends_in_order(node: torch.fx.Node) -> bool:
    """Whether a redistribution sends or receives in the layout of the program: chunk after chunk, or it is not a
    gather.
    """
    this, value = redistribution_of(node), node.meta["val"]
    _, dim = moved(this.source, this.target, parse_mesh(this.mesh).shape) or (0, 0)
    return not all(isinstance(size, int) for size in value.shape) or math.prod(value.shape[:dim]) == 1


def _written_by(node: torch.fx.Node) -> torch.fx.Node:
    """The node that wrote the memory of a node, behind views."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node


class _Order(ChunkOrder):
    """One order of rows in one graph: where it begins and ends, and the nodes that it removes."""

    def __init__(self, graph: torch.fx.Graph, rows: Rows, equal: set[torch.fx.Node]) -> None:
        super().__init__(graph, rows, equal)
        self.natural: dict[torch.fx.Node, torch.fx.Node] = {}
        #: Nodes that stay in the order of the program, and are copied into the other one.
        self.freely: set[torch.fx.Node] = set()
        self.old: set[torch.fx.Node] = set()

    def run(self) -> list[Decision]:
        nodes = list(self.graph.nodes)
        decisions: list[Decision] = []
        scatters: list[torch.fx.Node] = []
        for node in nodes:
            if node.target is not redistribute_op or rows_of(node) != self.rows:
                self.follow(node)
            elif _gathers(redistribution_of(node).source, self._mesh_dim(node)):
                self._gather(node)
                decisions.append(self._decision(node))
            else:
                scatters.append(node)
        for node in nodes:
            if node.target is aten.mm.default:
                self._sum_over_rows(node)
        for node in scatters:
            if self._hoist(redistribution_of(node).local):
                self._scatter(node)
                decisions.append(self._decision(node))
        self._read_natural(nodes)
        self._erase_unused()
        return decisions

    def _read_natural(self, nodes: list[torch.fx.Node]) -> None:
        """Makes readers that stay in the order of the program read nodes in that order."""
        for node in nodes:
            if node in self.in_order and node not in self.freely:
                for user in [user for user in node.users if user not in self.in_order and user not in self.old]:
                    user.replace_input_with(node, self._natural(node))

    def _decision(self, node: torch.fx.Node) -> Decision:
        reason = (
            f"rows stay in the order of the collective, {self.rows.chunks} chunks; their permutation is part of "
            "another kernel"
        )
        return Decision("order_rows", source_line(node), reason, str(redistribution_of(node)), "the same over chunks")

    def _mesh_dim(self, node: torch.fx.Node) -> int:
        this = redistribution_of(node)
        found = moved(this.source, this.target, parse_mesh(this.mesh).shape)
        assert found is not None
        return found[0]

    def _over_chunks(self, node: torch.fx.Node) -> tuple[str, str, list[int]]:
        """Specs and shape of the redistribution over a new first dim, the dim of the chunks."""
        this = redistribution_of(node)
        found = moved(this.source, this.target, parse_mesh(this.mesh).shape)
        assert found is not None
        mesh_dim, dim = found

        def shifted(text: str) -> str:
            placements: list[Placement] = []
            for i, p in enumerate(parse_spec(text)):
                placements.append(p if not isinstance(p, Shard) else Shard(0) if i == mesh_dim else Shard(p.dim + 1))
            return spec_text(placements)

        shape = [self.rows.chunks, *this.shape[:dim], self.rows.length, *this.shape[dim + 1 :]]
        return shifted(this.source), shifted(this.target), shape

    def _gather(self, node: torch.fx.Node) -> None:
        source, target, shape = self._over_chunks(node)
        this = redistribution_of(node)
        local = self.call(node, node, aten.unsqueeze.default, this.local, 0)
        whole = self.call(node, node, redistribute_op, local, source, target, this.mesh, shape)
        rest = self.rest(node)
        assert rest is not None
        self.add(node, aten.view.default, whole, [self.rows.total, *rest])
        self.old.add(node)

    def _scatter(self, node: torch.fx.Node) -> None:
        source, target, shape = self._over_chunks(node)
        this = redistribution_of(node)
        value = this.local.meta["val"]
        dim = len(shape) - 1 - len(self.rest(this.local) or [])
        local = [self.rows.chunks, *value.shape[: dim - 1], self.rows.length, *value.shape[dim:]]
        chunks = self.call(node, node, aten.view.default, self.in_order[this.local], local)
        part = self.call(node, node, redistribute_op, chunks, source, target, this.mesh, shape)
        node.replace_all_uses_with(self.call(node, node, aten.view.default, part, list(value_of(node).shape)))
        self.old.add(node)

    def _hoist(self, node: torch.fx.Node) -> bool:
        """Computes `node` in order, if its operands are, or are written by kernels that may write in any order."""
        if node in self.in_order or not self._can_be_hoisted(node):
            return node in self.in_order
        put_in_order = self._rows_written_freely if node.target is aten.mm.default else self._hoist
        for source in self._operands_of_rows(node):
            put_in_order(source)
        return self.follow(node)

    def _can_be_hoisted(self, node: torch.fx.Node) -> bool:
        if node in self.in_order:
            return True
        operands = self._operands_of_rows(node)
        if node.target is aten.mm.default:
            return node.args[1] not in self.in_order and all(map(self._is_written_freely, operands)) and bool(operands)
        return bool(operands) and all(map(self._can_be_hoisted, operands))

    def _operands_of_rows(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The operands with rows of a node that acts row by row; empty for any other node."""
        rest = self.rest(node)
        if rest is None or node.op != "call_function":
            return []
        if node.target in RESHAPES or node.target is aten.mm.default:
            return [node_arg(node, 0)]
        if not is_elementwise(node.target):
            return []
        return [
            source for source in node.all_input_nodes if not self.is_operand(source, rest) or source in self.in_order
        ]

    def _is_written_freely(self, node: torch.fx.Node) -> bool:
        """Whether `node` is in order, or can be without a standalone copy."""
        return node in self.in_order or self.rest(node) is not None and not is_outside(_written_by(node))

    def _rows_written_freely(self, node: torch.fx.Node) -> bool:
        """Puts `node` in order if that needs no standalone copy."""
        if node in self.in_order or not self._is_written_freely(node):
            return node in self.in_order
        rest = self.rest(node)
        assert rest is not None
        lead, chunks, length = self.rows
        parts = self.call(node, node, aten.view.default, node, [lead, chunks, length, *rest])
        first = self.call(node, node, aten.permute.default, parts, [1, 0, *range(2, len(rest) + 3)])
        copy = self.call(node, node, aten.clone.default, first, memory_format=torch.contiguous_format)
        self.add(node, aten.view.default, copy, [self.rows.total, *rest])
        self.freely.add(node)
        return True

    def _sum_over_rows(self, node: torch.fx.Node) -> None:
        """``mm(t(x), y)`` with rows on both sides: in order, if one of them is and the other can be."""
        left, right = node_arg(node, 0), node_arg(node, 1)
        if node in self.in_order or not transposes(left):
            return
        x = node_arg(left, 0)
        if x not in self.in_order and right not in self.in_order:
            return
        if len(self.rest(x) or []) == 1 and self._rows_written_freely(x) and self._rows_written_freely(right):
            flipped = self.call(node, node, aten.permute.default, self.in_order[x], [1, 0])
            matmul = self.call(node, node, aten.mm.default, flipped, self.in_order[right])
            node.replace_all_uses_with(matmul)
            self.old.add(node)

    def _natural(self, node: torch.fx.Node) -> torch.fx.Node:
        """`node` in the order of the program, from its copy in the order of the chunks."""
        if node not in self.natural:
            rest = self.rest(node) or []
            lead, chunks, length = self.rows
            place = self.in_order[node]
            parts = self.call(place, node, aten.view.default, place, [chunks, lead, length, *rest])
            first = self.call(place, node, aten.permute.default, parts, [1, 0, *range(2, len(rest) + 3)])
            copy = self.call(place, node, aten.clone.default, first, memory_format=torch.contiguous_format)
            self.natural[node] = self.call(place, node, aten.view.default, copy, list(value_of(node).shape))
        return self.natural[node]

    def _erase_unused(self) -> None:
        mine = {*self.in_order, *self.made, *self.old}
        for node in reversed(list(self.graph.nodes)):
            if not node.users and node.op == "call_function" and (node in mine or node.target in VIEWS):
                self.graph.erase_node(node)
