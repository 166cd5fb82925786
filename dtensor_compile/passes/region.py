"""A region of a graph that can run on other local tensors; shared by the passes that move many redistributions.

In: a graph, and redistributions with another spec in which their results could be left (`grow_region`). The operators
behind them that can run on such results, by the algebra of ``algebra.py``, make a region: each of its nodes has a form
in the graph, and one in which it could be held. Out: the cost (``minimum_cut.py`` minimizes it), and the rewritten
graph (`Region.rewrite`).

Sizes are those of global tensors, so that every rank finds the same minimum cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import networkx as nx
import torch
import torch.distributed as dist

from dtensor_compile.errors import PlanError
from dtensor_compile.graph.arguments import const_arg, node_arg, value_of, values_of
from dtensor_compile.graph.copies import can_be_dense, erase_dead, replace
from dtensor_compile.graph.nodes import (
    Cost,
    RedistributeNode,
    is_redistribution,
    redistribute,
    redistribution_cost,
    redistribution_of,
    runs_when,
)
from dtensor_compile.graph.operator_traits import SIZED_VIEWS
from dtensor_compile.graph.rank_uniformity import mark_of, may_use_sizes
from dtensor_compile.ir.mesh import MeshLayout, parse_mesh
from dtensor_compile.passes.algebra import Form, form_of, has_numbers, may_round, run_on_locals, tensors_of
from dtensor_compile.passes.compose_redistributions import adds_no_partial
from dtensor_compile.passes.global_tensor import Global

#: The global form of a node without a mark; None if unknown.
Guess = Callable[[torch.fx.Node], Global | None]


class Member(NamedTuple):
    """A node of a region.

    Attributes:
        was, held: its global form in the graph, and the one that it could have; tuples for nodes that give several
            tensors.
        needs: global forms of its operands in that case.
    """

    was: tuple[Global, ...]
    held: tuple[Global, ...]
    needs: tuple[Global, ...]


@dataclass
class Region:
    """Nodes that could be held in another form, in the order of the graph.

    Attributes:
        mesh, layout, coordinate: the mesh of all its tensors, and the coordinate of this rank.
        origins: for each member a redistribution that it is behind; records the cause of new nodes.
        uniform, costs: caches.
    """

    mesh: str
    layout: MeshLayout
    coordinate: tuple[int, ...]
    guess: Guess
    members: dict[torch.fx.Node, Member] = field(default_factory=dict)
    origins: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    uniform: dict[torch.fx.Node, bool] = field(default_factory=dict)
    costs: dict[Any, Cost | None] = field(default_factory=dict)

    def is_rank_uniform(self, node: torch.fx.Node) -> bool:
        """Whether DTensor made a node, so that it is the same operator with the same numbers on every rank.

        It did if the result has a mark, or if the node is part of an operator that DTensor decomposed: then all readers
        of the result are made by DTensor, whereas a tensor that a program makes itself becomes a DTensor through a view
        (`DTensor.from_local`), or is a single number.
        """
        pending = [node]
        while pending:
            last = pending[-1]
            value = last.meta.get("val")
            if last in self.uniform:
                pending.pop()
            elif mark_of(last) is not None:
                self.uniform[last] = last.target not in SIZED_VIEWS or mark_of(last.args[0]) is not None
            elif last.op != "call_function" or isinstance(value, torch.Tensor) and not value.dim() or not last.users:
                self.uniform[last] = False
            else:
                open_ = [user for user in last.users if user not in self.uniform]
                pending += open_
                if not open_:
                    self.uniform[last] = all(self.uniform[user] for user in last.users)
        return self.uniform[node]

    def known(self, node: torch.fx.Node) -> Global | None:
        """The global form of a node in the graph."""
        if node in self.members:
            was = self.members[node].was
            return was[0] if len(was) == 1 else None
        mark = mark_of(node)
        if mark is None:
            return self.guess(node)
        return Global.of(mark.spec, mark.shape) if mark.mesh == self.mesh else None

    def move(self, source: Global, target: Global, node: torch.fx.Node) -> Cost | None:
        """Cost of redistributing a tensor with the elements of `node`; None if no exact plan exists."""
        key = source, target, value_of(node).element_size()
        if key not in self.costs:
            this = RedistributeNode(node, source.spec, target.spec, self.mesh, source.shape)
            try:
                exact = adds_no_partial(this.source, this.target)
                self.costs[key] = redistribution_cost(this, key[2]) if exact else None
            except PlanError:
                self.costs[key] = None
        return self.costs[key]

    def readers(self, node: torch.fx.Node) -> tuple[list[torch.fx.Node], list[torch.fx.Node], list[torch.fx.Node]]:
        """The readers of a member: other members, redistributions of it, and the rest."""
        mine, moved, others = list[torch.fx.Node](), list[torch.fx.Node](), list[torch.fx.Node]()
        for user in node.users:
            if is_redistribution(user):
                this, was = redistribution_of(user), self.members[node].was[0]
                same = (this.source, this.mesh) == (was.spec, self.mesh)
                (moved if same else others).append(user)
            else:
                (mine if user in self.members else others).append(user)
        return mine, moved, others

    def parts(self) -> Iterator[list[torch.fx.Node]]:
        """The members in groups that are independent of each other."""
        links, nodes = nx.Graph(), list(self.members)
        number = {node: k for k, node in enumerate(nodes)}
        links.add_nodes_from(number.values())
        links.add_edges_from((number[node], number[user]) for node in nodes for user in self.readers(node)[0])
        for part in nx.connected_components(links):
            yield [nodes[k] for k in sorted(part)]

    def choices(self, node: torch.fx.Node) -> Iterator[tuple[Cost | None, Cost | None]]:
        """Cost of the redistributions that depend on one member alone: if it is as in the graph, and if it is held."""
        (was, *_), (held, *_) = self.members[node].was, self.members[node].held
        if is_redistribution(node):
            source = Global.of(redistribution_of(node).source, was.shape)
            assert source is not None
            yield self.move(source, was, node), self.move(source, held, node)
        for user in self.readers(node)[1]:
            target = Global.of(redistribution_of(user).target, was.shape)
            yield (
                (self.move(was, target, node), self.move(held, target, node))
                if target is not None
                else (Cost(0, 0), None)
            )

    def back(self, node: torch.fx.Node) -> Cost | None:
        """Cost of reading a held member in its form in the graph.

        None if its readers need strides that a copy cannot have, and for masks: Inductor fails on kernels that read
        gathered ones.
        """
        member = self.members[node]
        if len(member.was) > 1 or value_of(node).dtype == torch.bool:
            return None
        if not may_use_sizes() and not member.was[0].is_even(self.layout) or not can_be_dense(node):
            return None  # strides of uneven shards are not the same on all ranks
        return self.move(member.held[0], member.was[0], node)

    def reads(self, node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, Cost | None, Cost | None]]:
        """The operands of a held member, and the cost of reading each: if the operand is as in the graph, and if it is
        held.

        Sharding a replicated tensor along a mesh dim is free, unless a mesh dim inside of it shards the same tensor
        dim.
        """
        for operand, need in zip(tensors_of(node) or (), self.members[node].needs):
            have, member = self.known(operand), self.members.get(operand)
            here = self.move(have, need, operand) if have is not None else None
            yield operand, here, here if member is None else self.move(member.held[0], need, operand)

    def cost(self, part: Iterable[torch.fx.Node], held: frozenset[torch.fx.Node]) -> Cost | None:
        """Cost of the redistributions of a part if the nodes `held` are held; None if that is impossible."""
        costs: list[Cost | None] = []
        for node in part:
            mine, _, others = self.readers(node)
            costs += [there if node in held else stays for stays, there in self.choices(node)]
            if node in held:
                if others or any(user not in held for user in mine):
                    costs.append(self.back(node))
                costs += [there if operand in held else here for operand, here, there in self.reads(node)]
        return sum_of(costs)

    def rewrite(self, held: frozenset[torch.fx.Node]) -> None:
        """Holds the nodes `held` in their other form."""
        made: dict[torch.fx.Node, torch.fx.Node] = {}
        cuts: dict[Any, torch.fx.Node] = {}
        nodes = [node for node in self.members if node in held]

        for node in nodes:
            member = self.members[node]
            if is_redistribution(node):
                this = redistribution_of(node)._replace(target=member.held[0].spec)
                made[node] = this.local if this.source == this.target else redistribute(this, like=node, before=node)
            elif node.target is operator.getitem:
                made[node] = _run(self, node, [made[node_arg(node, 0)]], member.held)
            else:
                operands = zip(tensors_of(node) or (), member.needs)
                made[node] = _run(
                    self, node, [self._cut(node, x, need, made, cuts) for x, need in operands], member.held
                )
        for node in nodes:
            self._give_to_readers(node, made[node], held)
        for node in (*reversed(nodes), *reversed(made.values())):
            if not node._erased:
                erase_dead(node)

    def _cut(
        self,
        node: torch.fx.Node,
        operand: torch.fx.Node,
        need: Global,
        made: Mapping[torch.fx.Node, torch.fx.Node],
        cuts: dict[Any, torch.fx.Node],
    ) -> torch.fx.Node:
        """An operand of `node` in the form that it needs.

        Args:
            made: members in their other form.
            cuts: operands that were sharded before, by form and graph; the new one is added.
        """
        have = self.members[operand].held[0] if operand in made else self.known(operand)
        local = made.get(operand, operand)
        if have is None or have.placements == need.placements:
            return local
        key = operand, need.spec, runs_when(node)
        if key not in cuts:
            this = RedistributeNode(local, have.spec, need.spec, self.mesh, need.shape)
            cuts[key] = redistribute(this, like=operand, before=node)
        return cuts[key]

    def _give_to_readers(self, node: torch.fx.Node, new: torch.fx.Node, held: frozenset[torch.fx.Node]) -> None:
        """Makes redistributions of `node`, and readers that are not held, read `new`, the held form of `node`."""
        mine, moved, others = self.readers(node)
        (was, *_), (now, *_) = self.members[node].was, self.members[node].held
        for user in moved:
            this = redistribution_of(user)._replace(local=new, source=now.spec)
            if this.source == this.target:
                replace(user, new, shared=True)
            else:
                replace(user, redistribute(this, like=user, before=user))
        if outside := {user for user in (*others, *mine) if user not in held}:
            this = RedistributeNode(new, now.spec, was.spec, self.mesh, was.shape)
            place, origin = _place(node, outside), self.origins[node]
            like = origin if runs_when(origin) == runs_when(place) else node
            replace(node, redistribute(this, like=like, before=place))


def _run(
    region: Region, node: torch.fx.Node, operands: list[torch.fx.Node], results: tuple[Global, ...]
) -> torch.fx.Node:
    """Runs the operator of `node` on other local tensors of the region, with other `results`."""
    new = run_on_locals(node, operands, results, region.layout, region.coordinate, node)
    for value, result in zip(values_of(new), results):
        held = result.local_shape(region.layout, region.coordinate)
        assert list(value.shape) == held, f"{node} does not give {result}"
    return new


def sum_of(costs: Iterable[Cost | None]) -> Cost | None:
    """The sum of costs; None if one of them is None."""
    each = list(costs)
    if any(c is None for c in each):
        return None
    return Cost(sum(c.collectives for c in each if c is not None), sum(c.bytes for c in each if c is not None))


def grow_region(
    graph: torch.fx.Graph, mesh: str, seeds: Mapping[torch.fx.Node, Global], guess: Guess = lambda node: None
) -> Region | None:
    """The region behind redistributions whose results could be left in another spec; None on a rank outside of the
    mesh.

    Args:
        seeds: redistribute nodes on `mesh`, and the forms in which their results could be held.
        guess: global forms of nodes without a mark; numbers of nodes that it knows are the same on every rank.
    """
    layout = parse_mesh(mesh)
    coordinate = layout.coordinate(dist.get_rank())
    if coordinate is None:
        return None
    region = Region(mesh, layout, tuple(coordinate), guess)
    for node in graph.nodes:
        member = _member(region, node, seeds)
        if member is not None:
            region.origins[node] = next((region.origins[x] for x in node.all_input_nodes if x in region.origins), node)
            region.members[node] = member
    return region


def _member(region: Region, node: torch.fx.Node, seeds: Mapping[torch.fx.Node, Global]) -> Member | None:
    """`node` as a member of a region that has the nodes before it; None if it is not one."""
    members = region.members
    if is_redistribution(node):
        if node not in seeds or redistribution_of(node).local in members:
            return None
        was = Global.of(redistribution_of(node).target, redistribution_of(node).shape)
        return Member((was,), (seeds[node],), ()) if was is not None else None
    if node.op != "call_function" or not any(x in members for x in node.all_input_nodes):
        return None
    if node.target is operator.getitem:
        made, k = members[node_arg(node, 0)], const_arg(node, 1, int)
        return Member((made.was[k],), (made.held[k],), made.held)
    return _operation(region, node)


def _operation(region: Region, node: torch.fx.Node) -> Member | None:
    """An operator on members, as a member; None if it cannot be one."""
    operands = tensors_of(node) or []
    given = [known for x in operands if (known := region.known(x)) is not None]
    if not given or len(given) < len(operands):
        return None
    mark = mark_of(node)
    if has_numbers(node) and not region.is_rank_uniform(node) and region.guess(node) is None:
        return None
    shapes = (mark.shape,) if mark is not None and mark.mesh == region.mesh else None
    there = form_of(node, given, region.layout, shapes)
    if there is None or there.needs != tuple(given) or not _agrees(region, node, there):
        return None
    other = [region.members[x].held[0] if x in region.members else g for x, g in zip(operands, given)]
    held = form_of(node, other, region.layout, tuple(g.shape for g in there.gives))
    if held is None or held.gives == there.gives and held.needs == there.needs:
        return None
    uneven = may_use_sizes() and not all(g.is_even(region.layout) for g in (*held.needs, *held.gives))
    if uneven or any(may_round(node, g) for g in held.gives):
        return None
    return Member(there.gives, held.gives, held.needs)


def _agrees(region: Region, node: torch.fx.Node, there: Form) -> bool:
    """Whether the algebra gives the known global form of a node in the graph."""
    mark = mark_of(node)
    if mark is not None and mark != there.gives[0].mark(region.layout):
        return False
    if not may_use_sizes():
        return mark is not None
    shapes = [list(value.shape) for value in values_of(node)]
    return shapes == [g.local_shape(region.layout, region.coordinate) for g in there.gives]


def _place(node: torch.fx.Node, readers: set[torch.fx.Node]) -> torch.fx.Node:
    """The place to make a tensor for readers: that of `node`, but not in the forward if only the backward reads it."""
    if any(runs_when(user) == runs_when(node) for user in readers):
        return node
    return next(later for later in _behind(node) if later in readers)


def _behind(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    while node.op != "root":
        yield node
        node = node.next
