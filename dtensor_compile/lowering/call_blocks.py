"""Calls of blocks become calls of their graphs, each of which Inductor lowers once.

before   call_block([x, w1], "0.0"); call_block([y, w2], "0.0")
after    invoke_subgraph(block_0_0, "0.0", x, w1); invoke_subgraph(block_0_0, "0.0", y, w2)
"""

from __future__ import annotations

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
            member = "block_" + name.replace(".", "_")
            if not hasattr(graph.owning_module, member):
                module = graph_of_block(name).module
                module.meta |= {BLOCK: name, MODULE: graph_of_block(name).of}
                setattr(graph.owning_module, member, module)
            with graph.inserting_before(node):
                called = graph.call_function(CALL, (graph.get_attr(member), name, *list_arg(node, 0)))
            called.meta = {key: value for key, value in node.meta.items() if key != _STRIDES}
            called.meta |= {"val": tuple(node.meta["val"]), DRAWS: graph_of_block(name).draws}
            node.replace_all_uses_with(called)
            graph.erase_node(node)
