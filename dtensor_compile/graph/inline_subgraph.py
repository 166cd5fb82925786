"""The operators of one graph put into another: what a node is lowered to.

Layers of a model repeat what they are lowered to, and tracing it takes milliseconds, so that a traced graph is put in
many times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_arg

from dtensor_compile.graph.arguments import fake_result
from dtensor_compile.graph.node_builder import inherited


def splice(
    graph: torch.fx.Graph, part: torch.fx.Graph, inputs: Sequence[Any], meta: Mapping[str, Any], *, again: bool
) -> Any:
    """Puts the operators of `part` where `graph` inserts; what its result is there.

    Args:
        inputs: nodes and numbers for the placeholders of `part`.
        meta: goes to every new node.
        again: `part` was put in before. Two values of a graph never share a fake tensor, as passes read from it which
            ones share memory: fake values are made again.
    """
    values = dict(zip(part.find_nodes(op="placeholder"), inputs))
    for inner in part.nodes:
        if inner.op == "output":
            return map_arg(inner.args[0], lambda n: values[n])
        if inner.op == "placeholder":
            continue
        copy = graph.node_copy(inner, lambda n: values[n])
        copy.meta.update(meta)
        if again:
            copy.meta["val"] = fake_result(copy)
        values[inner] = copy
    raise AssertionError("a graph has an output")


def cut_out(result: torch.fx.Node, source: torch.fx.Node) -> torch.fx.Graph:
    """The graph of what `result` is made of, as one that is traced on the placeholder `source` alone: `splice` it."""
    needed, pending = {source, result}, [result]
    while pending:
        more = [node for node in pending.pop().all_input_nodes if node not in needed]
        needed.update(more)
        pending += more
    part = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in result.graph.nodes:
        if node in needed:
            values[node] = part.node_copy(node, lambda n: values[n])
    part.output(values[result])
    return part


def without_values(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy to keep for other traces, whose nodes have no fake values (and so keep no tracer alive): `splice` it
    `again`.
    """
    copy = torch.fx.Graph()
    values: dict[torch.fx.Node, Any] = {}
    output = copy.graph_copy(graph, values)
    copy.output(output)
    for node in copy.nodes:
        node.meta = inherited(node)
    return copy
