"""The order in which the collectives of a lowered graph start: gathers of inputs come one step ahead of their use.

    before   start rs(g2); start ag(w1); wait; mm(w1); start rs(g1); start ag(w0); wait; mm(w0)
    after    start ag(w1); start rs(g2); wait; mm(w1); start ag(w0); start rs(g1); wait; mm(w0)

Starts follow the order of the program, except gathers of inputs (sharded parameters), which need nothing that the graph
computes. Such a gather moves before the collectives between it and the first use of the gather before it; if gathers
are small, of as many gathers before it as make up `AHEAD` of all gathered bytes. Otherwise a gather would queue behind
reductions that nothing waits for, or behind an exchange of activations that is not even ready.

All ranks find the same order: it follows from the uses of nodes and from the sizes of gathered tensors, which are
padded and therefore equal, never from estimated times. Gathers do not move across collectives of the program itself
(`REDISTRIBUTES` is not set), because their ranks need not run the same program.
"""

from __future__ import annotations

import operator

import torch

from dtensor_compile.compat.aot.random_state import draws
from dtensor_compile.graph.arguments import operator_of
from dtensor_compile.graph.node_costs import result_bytes
from dtensor_compile.graph.nodes import is_fixed, is_start, is_wait
from dtensor_compile.graph.operator_traits import MATMULS, is_view
from dtensor_compile.ops.groups import REDISTRIBUTES

#: A gather starts before the use of the preceding gathers that make up this fraction of all gathered bytes.
AHEAD = 0.05


def hoist_gathers(graph: torch.fx.Graph) -> int:
    """Moves gathers of inputs up, with the copies and casts that they need, and those that are used late down; returns
    the number of moved gathers.
    """
    sunk = _sink_gathers(graph)
    position = {node: index for index, node in enumerate(graph.nodes)}
    of_inputs: set[torch.fx.Node] = set()
    gathers: list[tuple[torch.fx.Node, int]] = []  # and how many of `others` stand before it
    others: list[torch.fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or is_light(node) and of_inputs.issuperset(node.all_input_nodes):
            of_inputs.add(node)
        elif is_start(node) and _is_gather(node) and of_inputs.issuperset(node.all_input_nodes):
            gathers.append((node, len(others)))
        elif is_start(node) or is_fixed(node):
            others.append(node)
    if not gathers or not others:
        return sunk
    window = AHEAD * sum(result_bytes(gather) for gather, _ in gathers)
    uses = [_before(others, position, first_use(gather, position)) for gather, _ in gathers]
    moved = place = 0
    for index, (gather, own) in enumerate(gathers):
        back, size = index, 0
        while back > 0 and size < window:
            back -= 1
            size += result_bytes(gathers[back][0])
        barrier = max((i + 1 for i in range(own) if REDISTRIBUTES not in others[i].meta), default=0)
        place = max(place, barrier, min(own, uses[back] if size >= window else 0))
        if place < own:
            _move(gather, others[place], position)
            moved += 1
    return moved + sunk


def _sink_gathers(graph: torch.fx.Graph) -> int:
    """Moves each gather behind those that are used before it, but not past a fixed node; returns the number of moved
    gathers.

    A wrapper gathers all parameters of its module at its beginning, including those that are used last.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    gathers = [node for node in graph.nodes if is_start(node) and _is_gather(node)]
    fixed = [
        position[node] for node in graph.nodes if is_fixed(node) or is_start(node) and REDISTRIBUTES not in node.meta
    ]
    uses = {node: first_use(node, position) for node in gathers}
    moved = 0
    for index in range(len(gathers) - 1, -1, -1):
        this = gathers[index]
        limit = min((place for place in fixed if place > position[this]), default=len(position))
        earlier = [other for other in gathers[index + 1 :] if uses[other] < uses[this] and position[other] < limit]
        target = max(earlier, key=position.__getitem__, default=None)
        if target is not None and position[target] < uses[this]:
            lower_users(this, target)
            target.append(this)
            moved += 1
    return moved


def lower_users(start: torch.fx.Node, place: torch.fx.Node) -> None:
    """Moves the waits for `start`, and the copies behind them, after `place`."""
    found: set[torch.fx.Node] = set()
    stack = [start]
    while stack:
        for user in stack.pop().users:
            if user not in found and user.op != "output" and user < place:
                found.add(user)
                stack.append(user)
    for node in sorted(found, reverse=True):
        place.append(node)


def _is_gather(node: torch.fx.Node) -> bool:
    return "all_gather" in operator_of(node)._schema.name and REDISTRIBUTES in node.meta


def is_light(node: torch.fx.Node) -> bool:
    """Whether an operator costs no more than a copy, and may run anywhere."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_start(node) or is_wait(node) or is_fixed(node):
        return False
    return not draws(target) and target._schema.name.replace("::", ".") not in MATMULS


def first_use(gather: torch.fx.Node, position: dict[torch.fx.Node, int]) -> int:
    """Position of the first node that reads the gathered tensor; views, waits and items of a list do not count."""
    first, stack, seen = len(position), [gather], {gather}
    while stack:
        for user in stack.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if is_wait(user) or user.target is operator.getitem or is_view(user.target):
                stack.append(user)
            else:
                first = min(first, position[user])
    return first


def _before(others: list[torch.fx.Node], position: dict[torch.fx.Node, int], limit: int) -> int:
    return sum(position[other] < limit for other in others)


def _move(gather: torch.fx.Node, target: torch.fx.Node, position: dict[torch.fx.Node, int]) -> None:
    """Moves `gather` and its operands before `target`."""
    needed, stack = {gather}, [gather]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in needed and position[source] > position[target]:
                needed.add(source)
                stack.append(source)
    for node in sorted(needed, key=position.__getitem__):
        target.prepend(node)
