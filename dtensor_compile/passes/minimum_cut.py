"""The members of a region that are held in their other form, chosen by a minimum cut.

In: a region, and a weight for costs. Out: the smallest cheapest set of its members that are held.

The boundary is a minimum cut (L. Ford, D. Fulkerson: Maximal Flow through a Network, 1956). Each node is on one of two
sides. A cost depends on a node alone (a redistribution that stays, or not) or on a node and its readers (a node that is
held in its other form and read in the first is redistributed once for all of them). The minimum is over the whole
graph, so that a redistribution moves past an operator that makes it more expensive if it gets cheaper behind the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import networkx as nx
import torch

from dtensor_compile.graph.arguments import value_of
from dtensor_compile.graph.nodes import Cost
from dtensor_compile.passes.region import Region

#: A price above any cost.
_NEVER = 1 << 80

#: The two sides of a cut.
_STAYS, _MOVES = 0, 1


def cheapest_cut(
    region: Region, part: list[torch.fx.Node], weight: Callable[[Cost], int], held_bytes: int = 0
) -> frozenset[torch.fx.Node]:
    """The members of `part` that are held at the lowest cost; the smallest such set.

    Args:
        weight: maps a cost to a number.
        held_bytes: weight of a byte of a local tensor; favors holding smaller tensors.
    """
    network = _Network(region, part, weight, held_bytes)
    for node in part:
        network.add(node)
    _, (_, away) = nx.minimum_cut(network.graph, _STAYS, _MOVES)
    return frozenset(node for node in part if network.number(node) in away)


@dataclass
class _Network:
    """Flow network of members. The cost of an edge counts if its first node stays and its second moves.

    Each member has two nodes: its own, and one that moves if one of its readers does.
    """

    region: Region
    part: list[torch.fx.Node]
    weight: Callable[[Cost], int]
    held_bytes: int
    graph: nx.DiGraph = field(default_factory=nx.DiGraph)

    def __post_init__(self) -> None:
        self.graph.add_nodes_from((_STAYS, _MOVES))
        self.numbers = {node: 2 + k for k, node in enumerate(self.part)}

    def number(self, node: torch.fx.Node) -> int:
        return self.numbers[node]

    def through(self, node: torch.fx.Node) -> int:
        return len(self.part) + self.numbers[node]

    def pay(self, a: int, b: int, price: Cost | int | None) -> None:
        """Adds a price that is paid if `a` stays and `b` moves; None if that is impossible."""
        capacity = _NEVER if price is None else price if isinstance(price, int) else self.weight(price)
        if capacity:
            have = self.graph[a][b]["capacity"] if self.graph.has_edge(a, b) else 0
            self.graph.add_edge(a, b, capacity=have + capacity)

    def add(self, node: torch.fx.Node) -> None:
        """Adds all costs that depend on `node`, or on it and its readers."""
        self.graph.add_node(self.number(node))
        self._pay_for_redistributions(node)
        if len(self.region.members[node].was) > 1:
            for user in self.region.readers(node)[0]:  # the items of a tuple go where it goes
                self.pay(self.number(node), self.number(user), None)
                self.pay(self.number(user), self.number(node), None)
            return
        if self.held_bytes:
            self._pay_for_memory(node)
        self._pay_for_readers(node)

    def _pay_for_redistributions(self, node: torch.fx.Node) -> None:
        k = self.number(node)
        for here, there in self.region.choices(node):
            self.pay(k, _MOVES, here)
            self.pay(_STAYS, k, there)
        for operand, here, there in self.region.reads(node):
            self.pay(_STAYS, k, there)
            if operand in self.numbers and there is not None:
                more = None if here is None else max(0, self.weight(here) - self.weight(there))
                self.pay(self.number(operand), k, more)

    def _pay_for_memory(self, node: torch.fx.Node) -> None:
        k, member, region = self.number(node), self.region.members[node], self.region
        each = self.held_bytes * value_of(node).element_size()
        whole, local = (
            each * math.prod(g[0].local_shape(region.layout, region.coordinate)) for g in (member.was, member.held)
        )
        self.pay(k, _MOVES, whole)
        self.pay(_STAYS, k, local)
        mine, _, others = region.readers(node)
        if mine or others:
            self.pay(self.through(node), k, whole)

    def _pay_for_readers(self, node: torch.fx.Node) -> None:
        mine, _, others = self.region.readers(node)
        if mine or others:
            self.pay(self.through(node), self.number(node), self.region.back(node))
        for user in mine:
            self.pay(self.number(user), self.through(node), None)
        if others:
            self.pay(_STAYS, self.through(node), None)
