"""Cuts calls of equal blocks out of a Dynamo graph: each becomes one node that calls the graph of all of them.

before   n1 = linear(x, w1); n2 = tanh(n1); n3 = linear(n2, w2); n4 = tanh(n3)     n1, n2 and n3, n4 with a `Place`
after    b1 = block(x, w1); n2 = b1[0]; b2 = block(n2, w2); n4 = b2[0]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtensor_compile.compat.dynamo.replay.node_copies import PLACE

#: The nodes of one call, by their numbers.
Call = Mapping[int, torch.fx.Node]


@dataclass(frozen=True)
class RepeatedBlock:
    """Calls with equal nodes.

    Attributes:
        body: the graph of one of them; its placeholders have the metadata of the inputs of the first call.
        inputs: of each call, in the order of the placeholders.
        results: numbers of the nodes that are used outside of a call, in the order of the results of `body`.
        calls: the nodes of each call.
        modules: Dynamo's stack of modules of each call, down to the block's own.
    """

    body: torch.fx.GraphModule
    inputs: tuple[tuple[torch.fx.Node, ...], ...]
    results: tuple[int, ...]
    calls: tuple[Call, ...]
    modules: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        """Dynamo's name of the module of the first call."""
        return next((str(name) for name, _ in reversed(self.modules[0].values())), "")


def repeated_blocks(program: torch.fx.GraphModule, *, marked: bool) -> list[RepeatedBlock]:
    """The blocks of a graph that are called at least twice, in the same state of torch as the graph itself.

    Args:
        marked: only those that the program marks as regions to compile once.
    """
    found: dict[int, dict[int, dict[int, torch.fx.Node]]] = {}
    for node in _in_the_state_of_the_graph(program.graph):
        if (place := node.meta.get(PLACE)) is not None and (place.region or not marked):
            found.setdefault(place.trace, {}).setdefault(place.call, {})[place.number] = node
    blocks = []
    for calls in found.values():
        most = max(map(len, calls.values()))
        whole = tuple(call for call in calls.values() if len(call) == most)
        if len(whole) >= 2:
            blocks.append(_block(program, whole))
    return blocks


def repeated_traces(program: torch.fx.GraphModule, *, marked: bool) -> tuple[int, ...]:
    """Numbers of the blocks that are called at least twice, in any state of torch.

    Args:
        marked: only those that the program marks as regions to compile once.
    """
    places = [node.meta[PLACE] for node in program.graph.nodes if PLACE in node.meta]
    return tuple(sorted({place.trace for place in places if place.call and (place.region or not marked)}))


#: Calls without a result that change nothing; others are taken for changes of the state of torch.
_HARMLESS = {torch._C._log_api_usage_once}


def _in_the_state_of_the_graph(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """Nodes between changes of the state of torch, such as an ``autocast`` that begins and has not ended."""
    grad, opened = torch.is_grad_enabled(), set[torch.fx.Node]()
    now = grad
    for node in graph.nodes:
        known = node.op != "call_function" or node.target in _HARMLESS
        if known or PLACE in node.meta or "example_value" in node.meta:
            if now == grad and not opened:
                yield node
        elif node.target is torch._C._set_grad_enabled:
            now = bool(node.args[0])
        elif node.args and node.args[0] in opened:
            opened.discard(node.args[0])  # type: ignore[arg-type]
        else:
            opened.add(node)


def _block(program: torch.fx.GraphModule, calls: tuple[dict[int, torch.fx.Node], ...]) -> RepeatedBlock:
    first = dict(sorted(calls[0].items()))
    inside = set(first.values())
    outer = dict.fromkeys(arg for node in first.values() for arg in node.all_input_nodes if arg not in inside)
    results = sorted({i for call in calls for i, node in call.items() if _is_used_outside(node, call)})
    graph, values = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in outer:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in first.values():
        values[node] = graph.node_copy(node, lambda arg: values[arg])
        values[node].meta.pop(PLACE)
    graph.output(tuple(values[first[i]] for i in results))
    inputs = []
    for call in calls:
        given: dict[torch.fx.Node, torch.fx.Node] = {}
        for i, node in first.items():
            given.update(zip(_args(node), _args(call[i]), strict=True))
        inputs.append(tuple(given[node] for node in outer))
    modules = tuple(map(_modules, calls))
    return RepeatedBlock(torch.fx.GraphModule(program, graph), tuple(inputs), tuple(results), calls, modules)


def _modules(call: Call) -> dict[str, Any]:
    """The modules that contain all nodes of a call."""
    stacks = [node.meta.get("nn_module_stack", {}) for node in call.values()]
    return {key: value for key, value in stacks[0].items() if all(key in stack for stack in stacks)}


def _args(node: torch.fx.Node) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _is_used_outside(node: torch.fx.Node, call: Call) -> bool:
    members = set(call.values())
    return any(user not in members for user in node.users)


def replace_calls(block: RepeatedBlock, run: Callable[..., Any]) -> None:
    """Replaces the nodes of each call of a block by a call of `run`, which takes the inputs and returns the results."""
    replaced: dict[torch.fx.Node, torch.fx.Node] = {}
    for call, inputs, modules in zip(block.calls, block.inputs, block.modules, strict=True):
        last, members = call[max(call)], set(call.values())
        graph = last.graph
        with graph.inserting_after(last):
            whole = graph.call_function(run, tuple(replaced.get(node, node) for node in inputs))
        whole.meta["nn_module_stack"] = modules
        place = whole
        for position, number in enumerate(block.results):
            node = call[number]
            with graph.inserting_after(place):
                place = graph.call_function(operator.getitem, (whole, position))
            place.meta = {key: value for key, value in node.meta.items() if key != PLACE}
            for user in [user for user in node.users if user not in members]:
                user.replace_input_with(node, place)
            replaced[node] = place
        for number in sorted(call, reverse=True):
            graph.erase_node(call[number])
