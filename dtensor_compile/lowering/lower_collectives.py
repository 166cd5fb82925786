"""Collectives of the program: kept in order in the joint graph, started early and waited for late in a lowered graph.

    before   a = c10d_all_reduce(x, "sum", group, 0); b = relu(y); c = a + b
    after    s = all_reduce(x, "sum", group); b = relu(y); a = wait_tensor(s); c = a + b

    before   s = c10d_isend(x, 1, 0, group, 0); r = c10d_irecv(y, 1, 0, group, 1); b = relu(x); c = r + b
    after    e = c10d_exchange([x, y], [0, 1], ...); b = relu(x); r = wait_tensor(e[1]); c = r + b; wait_tensor(e[0])

Communication keeps the order of the program, since ranks need not run the same program (stages of a pipeline). Waits
move towards the first use, which no other rank can notice, but not past a write to memory from which a message may
still be read. Consecutive messages between ranks without a use of a received tensor between them start as one batch: if
each ended before the next starts, two ranks that send to each other would deadlock.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor_compile.compat.aot.random_state import draws
from dtensor_compile.compat.distributed.functional_collectives import (
    lower_as_collective,
    lower_as_effect,
    run_in_backward,
    run_once,
    stay_where_traced,
    traced_in_backward,
    wait_tensor,
)
from dtensor_compile.graph.arguments import operator_of, value_of
from dtensor_compile.graph.node_builder import add_call
from dtensor_compile.graph.nodes import communicates, cost_of, is_redistribution, is_wait
from dtensor_compile.graph.operator_traits import is_mutable
from dtensor_compile.ops.c10d import FUNCTIONAL, LOWERED, exchange, irecv, isend
from dtensor_compile.ops.held_gradients import HOLDS
from dtensor_compile.ops.random_ops import EFFECTS
from dtensor_compile.ops.redistribute_across import ORDERED

#: Operators that run once, in the order of the program, with their position in it as the last argument.
_ORDERED = ORDERED | {*EFFECTS, *HOLDS}
_INHERITED = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "partitioner_tag")


def runs_in_order(node: torch.fx.Node) -> bool:
    """Whether a node is a collective of the program, or acts on torch's generator, and runs once, in its order."""
    return node.target in _ORDERED


def order_collectives(graph: torch.fx.Graph) -> None:
    """Numbers all communication and operators on torch's generator in the joint graph.

    No two nodes are equal then, and none is recomputed in the backward.
    """
    place, from_gradients = 0, set[torch.fx.Node]()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        if tangent or not from_gradients.isdisjoint(node.all_input_nodes):
            from_gradients.add(node)
        if node.target in _ORDERED:
            node.args = (*node.args[:-1], place)
            place += 1
            run_once(node, node in from_gradients)


def hold_collectives(graph: torch.fx.Graph) -> None:
    """Keeps communication of the backward in the backward of the joint graph, and moves communication that only the
    backward needs there.

    For nodes that do not depend on tangents, the partitioner would choose the graph in which less has to be saved, by
    the sizes of local tensors. If shards are uneven these differ between ranks, and so would the collectives of their
    graphs.
    """
    results = next(iter(graph.find_nodes(op="output"))).all_input_nodes
    results += [wait for wait in filter(is_wait, graph.nodes) if not wait.users]  # of the program, where it was traced
    pending, in_forward = [node for node in results if not traced_in_backward(node)], set[torch.fx.Node]()
    while pending:
        node = pending.pop()
        if node not in in_forward:
            in_forward.add(node)
            pending += node.all_input_nodes
    for node in graph.nodes:
        if not _sends(node):
            continue
        if traced_in_backward(node):
            stay_where_traced(node)
        elif node not in in_forward:
            run_in_backward(node)


def _sends(node: torch.fx.Node) -> bool:
    """Whether a node communicates, and the partitioner may choose its graph (`order_collectives` has placed
    communication of the program).
    """
    if is_redistribution(node):
        return cost_of([node]).collectives > 0
    return communicates(node.target) and node.target is not wait_tensor and node.target not in _ORDERED


def hold_draws(graph: torch.fx.Graph) -> None:
    """Makes operators of the joint graph that draw from torch's generator run exactly once, in the graph in which they
    were traced, even if unused.
    """
    for node in graph.nodes:
        if draws(node.target) and node.target not in _ORDERED:
            stay_where_traced(node)


def is_repeatable(graph: torch.fx.Graph) -> bool:
    """Whether a graph gives the same results when it runs again.

    Redistributions are allowed: they are rank-uniform.
    """
    return not any(node.target in _ORDERED or draws(node.target) for node in graph.nodes)


def lower_collectives(graph: torch.fx.Graph) -> None:
    """Splits collectives of a forward or backward graph into starts and waits."""
    batch = _Batch()
    for node in graph.nodes:  # also visits the waits that are inserted further down
        is_message = node.target in (isend, irecv)
        if (
            is_message
            and batch.feeds(node)
            or not is_message
            and (communicates(node.target) or is_mutable(node.target) or node.op == "output")
        ):
            batch.lower()
            batch = _Batch()
        if is_message:
            batch.add(node)
        elif node.target in FUNCTIONAL:
            _lower_functional(node)
        elif batch.feeds(node):
            batch.users.append(node)
    for node in graph.nodes:
        if node.target in LOWERED or node.target in EFFECTS:
            lower_as_collective(node.target)
        elif node.target in HOLDS:
            lower_as_effect(node.target)


def _lower_functional(node: torch.fx.Node) -> None:
    with node.graph.inserting_before(node):
        start = _call(node, FUNCTIONAL[operator_of(node)], node.args[:-1], node.meta["val"])
    _wait(node, start)


@dataclass
class _Batch:
    """Messages that may start together: none depends on another one, and no other communication is between them.

    Attributes:
        messages: in the order of the graph.
        users: all transitive users of received tensors.
        early: those of `users` that are before the last message.
    """

    messages: list[torch.fx.Node] = field(default_factory=list)
    users: list[torch.fx.Node] = field(default_factory=list)
    early: list[torch.fx.Node] = field(default_factory=list)

    def feeds(self, node: torch.fx.Node) -> bool:
        return not {*self.messages, *self.users}.isdisjoint(node.all_input_nodes)

    def add(self, message: torch.fx.Node) -> None:
        self.messages.append(message)
        self.early = list(self.users)

    def lower(self) -> None:
        """Replaces the messages by one exchange at the place of the last one; users of received tensors move behind
        it.
        """
        if not self.messages:
            return
        messages, last = self.messages, self.messages[-1]
        place = last
        for user in self.early:
            place.append(user)
            place = user
        tensors, peers, tags, groups = (list(column) for column in zip(*(node.args[:4] for node in messages)))
        kinds = [int(node.target is irecv) for node in messages]
        values = [
            node.meta["val"] if receives else value_of(node).new_empty(1) for node, receives in zip(messages, kinds)
        ]
        with last.graph.inserting_before(last):
            start = _call(last, exchange, (tensors, kinds, peers, tags, groups), values)
            results = [_call(node, operator.getitem, (start, i), values[i]) for i, node in enumerate(messages)]
        for node, result in zip(messages, results):
            _wait(node, result)


def _wait(node: torch.fx.Node, start: torch.fx.Node) -> None:
    """Replaces `node` by a wait for `start`, as late as possible."""
    limit = start.next
    while limit.op != "output" and limit not in node.users and not is_mutable(limit.target):
        limit = limit.next
    with node.graph.inserting_before(limit):
        wait = _call(node, wait_tensor, (start,), start.meta["val"])
    node.replace_all_uses_with(wait)
    node.graph.erase_node(node)


def _call(like: torch.fx.Node, target: Any, args: tuple[Any, ...], value: object) -> torch.fx.Node:
    meta = {key: like.meta[key] for key in _INHERITED if key in like.meta}
    return add_call(like.graph, target, args, meta=meta, value=value)
