"""Inlines the operators of one graph into another, such as those that a node is lowered to.

Layers of a model repeat, and tracing takes milliseconds, so that a traced graph is inlined many times.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_arg

from dtensor_compile.compat.aot.fx import CALL, FakeLayout, called_graph, returns_new_tensors
from dtensor_compile.compat.dynamo.observers.module_names import module_name
from dtensor_compile.graph.arguments import const_arg, fake_result, node_arg
from dtensor_compile.graph.node_builder import inherited

#: Metadata for nodes.
Meta = Mapping[str, Any] | Callable[[torch.fx.Node], Mapping[str, Any]]
#: Keys of the name of a block, and of that of its module, in the metadata of its graph.
BLOCK, MODULE = "dtensor_compile_block", "dtensor_compile_module"
#: Layouts of the results of nodes, by name, of graphs that are inlined again and again, by those of their arguments.
_Layouts = dict[tuple[str, tuple[FakeLayout | None, ...]], FakeLayout | None]
_layouts = weakref.WeakKeyDictionary[torch.fx.Graph, _Layouts]()


def inline(graph: torch.fx.Graph, part: torch.fx.Graph, inputs: Sequence[Any], meta: Meta, *, again: bool) -> Any:
    """Inlines the operators of `part` at the insertion point of `graph`; returns its result there.

    Args:
        inputs: nodes and numbers for the placeholders of `part`.
        meta: metadata of every new node, or a function that makes it from the node that is copied.
        again: whether `part` was inlined before. Fake values are then made again: two values of a graph never share a
            fake tensor, as passes find aliases by them.
    """
    values = dict(zip(part.find_nodes(op="placeholder"), inputs))
    known = _layouts.setdefault(part, {}) if again else {}
    for inner in part.nodes:
        if inner.op == "output":
            return map_arg(inner.args[0], lambda n: values[n])
        if inner.op == "placeholder":
            continue
        copy = graph.node_copy(inner, lambda n: values[n])
        copy.meta.update(meta if isinstance(meta, Mapping) else meta(inner))
        if again:
            copy.meta["val"] = _result_again(inner, copy, known)
        values[inner] = copy
    raise AssertionError("a graph has an output")


def _result_again(inner: torch.fx.Node, copy: torch.fx.Node, known: _Layouts) -> Any:
    """The fake value of a copy of `inner`; like that of an earlier copy whose arguments had the same layouts."""
    given = [source.meta["val"] for source in copy.all_input_nodes]
    key = inner.name, tuple(map(FakeLayout.of, given))
    if not given or None in key[1] or not returns_new_tensors(inner.target):
        return fake_result(copy)
    if (layout := known.get(key)) is not None:
        return layout.fake(given[0].fake_mode)
    result = fake_result(copy)
    known[key] = FakeLayout.of(result)
    return result


def is_whole(graph: torch.fx.Graph) -> bool:
    """Whether a graph is that of the forward or of the backward pass, and not of a block that one of them calls."""
    return graph.owning_module is None or BLOCK not in graph.owning_module.meta


def nodes_with_blocks(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """The nodes of a graph in order, before each call of a block the nodes of that block."""
    for node in graph.nodes:
        if node.target is CALL:
            yield from nodes_with_blocks(called_graph(node).graph)
        yield node


def with_blocks(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy of a graph with the nodes of blocks in place of calls of them; the graph itself if it calls none.

    Nodes of all calls of a block share their fake values: for readers of the graph, not for passes. Their modules are
    those of their call.
    """
    if not graph.find_nodes(op="call_function", target=CALL):
        return graph
    copy = torch.fx.Graph(graph.owning_module)
    values: dict[torch.fx.Node, Any] = {}
    for node in graph.nodes:
        if node.target is CALL:
            inputs = [values[argument] for argument in node.args[2:]]  # type: ignore[index]
            called = called_graph(node)
            values[node] = inline(copy, called.graph, inputs, _modules_of_call(node, called), again=False)
        elif node.target is operator.getitem and isinstance(values[node_arg(node, 0)], (tuple, list)):
            values[node] = values[node_arg(node, 0)][const_arg(node, 1, int)]
        else:
            values[node] = copy.node_copy(node, lambda n: values[n])
    return copy


#: Keys of modules in the metadata of nodes of the forward and of the backward pass.
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def _modules_of_call(call: torch.fx.Node, block: torch.fx.GraphModule) -> Meta:
    """Metadata of the nodes of a block with the modules of one of its calls."""
    own, first = module_name(call), block.meta.get(MODULE, "")

    def moved(node: torch.fx.Node) -> Mapping[str, Any]:
        if not own or not first:
            return {}
        inside = {key: node.meta[key].items() for key in _STACKS if key in node.meta}
        return {
            key: {id: (own + name.removeprefix(first), of) for id, (name, of) in stack if name.startswith(first)}
            for key, stack in inside.items()
        }

    return moved


def cut_out(result: torch.fx.Node, source: torch.fx.Node) -> torch.fx.Graph:
    """The graph that computes `result` from the placeholder `source` alone, for `inline`."""
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
    """A copy without fake values (which would keep a tracer alive), to keep for other traces: `inline` it `again`."""
    copy = torch.fx.Graph()
    values: dict[torch.fx.Node, Any] = {}
    output = copy.graph_copy(graph, values)
    copy.output(output)
    for node in copy.nodes:
        node.meta = inherited(node)
    return copy
