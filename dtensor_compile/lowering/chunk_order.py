"""Recomputes nodes of a graph from rows in the order of the chunks of a collective.

In: a graph, the order of its rows, and some nodes in that order (`ChunkOrder.in_order`). Out: new nodes for readers
that act row by row: matmuls, elementwise operators, views, redistributions of dims behind the rows. ``order_rows.py``
decides where the order begins and ends.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx.node import map_arg

from dtensor_compile.compat.aot.random_state import draws
from dtensor_compile.compat.dtensor.specs import Shard, StridedShard
from dtensor_compile.graph.arguments import node_arg, value_of
from dtensor_compile.graph.node_builder import add_call, inherited
from dtensor_compile.graph.nodes import is_redistribution, redistribution_of
from dtensor_compile.graph.operator_traits import CASTS, RESHAPES, VIEWS, is_pointwise
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.ops.redistribute import redistribute_op

aten = torch.ops.aten


class Rows(NamedTuple):
    """The order of rows: `lead` times `chunks` times `length` of them in a program; chunks come first in a
    collective.
    """

    lead: int
    chunks: int
    length: int

    @property
    def total(self) -> int:
        return math.prod(self)


class ChunkOrder:
    """Rows of one graph in one order.

    Attributes:
        in_order: by node, the new node with its rows in the order of the chunks, ``[rows, ...]``.
        made: all new nodes.
        behind: by node, the last of the nodes that were inserted behind it.

    Args:
        equal: nodes whose sizes are the same on every rank; others do not count as rows.
    """

    def __init__(self, graph: torch.fx.Graph, rows: Rows, equal: set[torch.fx.Node]) -> None:
        self.graph, self.rows, self.equal = graph, rows, equal
        self.in_order: dict[torch.fx.Node, torch.fx.Node] = {}
        self.made: set[torch.fx.Node] = set()
        self.behind: dict[torch.fx.Node, torch.fx.Node] = {}

    def rest(self, node: torch.fx.Node) -> list[int] | None:
        """Sizes behind the rows; None if the node's leading dims are not the rows."""
        value = node.meta.get("val")
        if node not in self.equal or not isinstance(value, torch.Tensor):
            return None
        if not all(isinstance(size, int) for size in value.shape) or not value.is_contiguous():
            return None
        for k in range(1, value.dim() + 1):
            if math.prod(value.shape[:k]) == self.rows.total:
                return list(value.shape[k:])
        return None

    def follow(self, node: torch.fx.Node) -> bool:
        """Computes `node` in order if its operands are; returns whether it is in order."""
        rest = self.rest(node)
        if (
            node.op != "call_function"
            or rest is None
            or not any(source in self.in_order for source in node.all_input_nodes)
        ):
            return node in self.in_order
        if node.target in RESHAPES:
            self._view(node, self.in_order[node_arg(node, 0)], rest)
        elif node.target is aten.mm.default and node.args[0] in self.in_order and node.args[1] not in self.in_order:
            if not self._from_rows(node.args[1]):
                self.add(node, node.target, self.in_order[node_arg(node, 0)], node.args[1])
        elif is_redistribution(node):
            self._redistribute(node, rest)
        elif _is_rowwise(node.target) and all(self.is_operand(source, rest) for source in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: self.in_order.get(n, n))
            contiguous = {"memory_format": torch.contiguous_format} if node.target is aten.clone.default else {}
            self.add(node, node.target, *args, **{**kwargs, **contiguous})
        return node in self.in_order

    def _redistribute(self, node: torch.fx.Node, rest: list[int]) -> None:
        """Computes a redistribution of dims behind the rows in order, as it acts row by row."""
        this = redistribution_of(node)
        first = value_of(this.local).dim() - len(self.rest(this.local) or [])
        placements = [parse_spec(text) for text in (this.source, this.target)]
        cut = [p for p in (*placements[0], *placements[1]) if isinstance(p, (Shard, StridedShard))]
        if any(p.dim < first or isinstance(p, StridedShard) for p in cut) or len(this.shape) - first != len(rest):
            return
        texts = [
            spec_text([Shard(p.dim - first + 1) if isinstance(p, Shard) else p for p in spec]) for spec in placements
        ]
        self.add(
            node, redistribute_op, self.in_order[this.local], *texts, this.mesh, [self.rows.total, *this.shape[first:]]
        )

    def is_operand(self, source: torch.fx.Node, rest: list[int]) -> bool:
        """Whether an operand of an elementwise operator is in order, or the same for all rows."""
        value = source.meta.get("val")
        if source in self.in_order:
            return value_of(self.in_order[source]).dim() == len(rest) + 1
        return not isinstance(value, torch.Tensor) or value.dim() <= len(rest)

    def _from_rows(self, node: Any) -> bool:
        """Whether a right operand is a transpose of rows: a matmul of rows with rows."""
        return (
            isinstance(node, torch.fx.Node)
            and node.target in VIEWS
            and any(s in self.in_order for s in node.all_input_nodes)
        )

    def _view(self, node: torch.fx.Node, place: torch.fx.Node, rest: list[int]) -> None:
        """Puts a view `node` in order: `place`, reshaped if necessary."""
        if value_of(place).shape == torch.Size([self.rows.total, *rest]):
            self.in_order[node] = place
        else:
            self.add(node, aten.view.default, place, [self.rows.total, *rest])

    def add(self, node: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> None:
        """Puts `node` in order, as the result of `target`."""
        self.in_order[node] = self.call(node, node, target, *args, **kwargs)

    def call(self, after: torch.fx.Node, like: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A new node behind `after` and those inserted there before."""
        with self.graph.inserting_after(self.behind.get(after, after)):
            new = add_call(self.graph, target, args, kwargs, meta=inherited(like))
        self.behind[after] = new
        self.made.add(new)
        return new


def is_elementwise(target: Any) -> bool:
    """Whether an operator computes each element from those at its place, and draws no random numbers."""
    return is_pointwise(target) and not draws(target)


def _is_rowwise(target: Any) -> bool:
    return target is aten.clone.default or target in CASTS or is_elementwise(target)
