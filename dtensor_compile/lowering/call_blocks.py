"""Calls of graphs, each of which Inductor lowers once; calls of blocks become such.

before   call_block([x, w1], "0.0"); call_block([y, w2], "0.0")
after    invoke_subgraph(block_0_0, "0.0", x, w1); invoke_subgraph(block_0_0, "0.0", y, w2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtensor_compile.compat.aot.fx import CALL
from dtensor_compile.compat.aot.random_state import DRAWS
from dtensor_compile.graph.arguments import const_arg, list_arg
from dtensor_compile.graph.inline_subgraph import BLOCK, MODULE
from dtensor_compile.ops.call_block import CALLS_OF_BLOCKS, graph_of_block

#: Key of the metadata that torch's partitioner keeps for layout constraints of operators; a call has none.
_STRIDES = "eager_input_vals"


def call_blocks(graph: torch.fx.Graph) -> None:
    """Replaces the operators that stand for calls of blocks; the graphs become members of the module of `graph`."""
    for op in CALLS_OF_BLOCKS:
        for node in graph.find_nodes(op="call_function", target=op):
            name = const_arg(node, 1, str)
            block = graph_of_block(name)
            block.module.meta |= {BLOCK: name, MODULE: block.of}
            meta = {key: value for key, value in node.meta.items() if key != _STRIDES}
            with graph.inserting_before(node):
                called = add_graph_call(graph, block.module, list_arg(node, 0), meta)
            called.meta |= {"val": tuple(node.meta["val"]), DRAWS: block.draws}
            node.replace_all_uses_with(called)
            graph.erase_node(node)


def add_graph_call(
    graph: torch.fx.Graph, module: torch.fx.GraphModule, inputs: Sequence[torch.fx.Node], meta: Mapping[str, Any]
) -> torch.fx.Node:
    """A call of the graph of `module` at the insertion point of `graph`.

    Args:
        module: over tensors; returns a tuple of new tensors. ``module.meta[BLOCK]`` is its name in the module of
            `graph`, whose member it becomes.
        meta: of the call; the caller adds its value.
    """
    name = module.meta[BLOCK]
    member = "block_" + name.replace(".", "_")
    if not hasattr(graph.owning_module, member):
        setattr(graph.owning_module, member, module)
    called = graph.call_function(CALL, (graph.get_attr(member), name, *inputs))
    called.meta = dict(meta)
    return called
