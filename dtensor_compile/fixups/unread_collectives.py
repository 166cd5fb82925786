"""Collectives of DTensor's own that nobody reads are dropped from a joint graph.

DTensor's operators redistribute their arguments with collectives that are no redistribute nodes: a norm that is summed
where it is next read, once for every reader, and once more where only its shape is asked for. The results of some are
read by nothing, and torch drops no wait for a collective.

    before   n = pow(sum(x * x), 0.5); a = wait(reduce_scatter(n ** 2)); b = wait(reduce_scatter(n ** 2)); return b ** 0.5
    after    n = pow(sum(x * x), 0.5); b = wait(reduce_scatter(n ** 2)); return b ** 0.5

A collective that the program itself calls stays, since another rank may count on it.
"""

from __future__ import annotations

import torch

from dtensor_compile.graph.copies import erase_dead
from dtensor_compile.graph.nodes import is_start, is_wait


def calls_collectives(program: torch.fx.GraphModule) -> bool:
    """Whether a traced program calls functional collectives of torch's itself."""
    graphs = [module.graph for module in program.modules() if isinstance(module, torch.fx.GraphModule)]
    return any(is_start(node) or _is_packet(node) for graph in graphs for node in graph.nodes)


def _is_packet(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverloadPacket) and node.target._qualified_op_name.startswith(
        "_c10d_functional::"
    )


def drop_unread_collectives(graph: torch.fx.Graph) -> None:
    """Erases waits that nobody reads, their collectives, and what those alone read, from the joint graph of a program
    without its own.
    """
    for wait in reversed(list(filter(is_wait, graph.nodes))):
        start = wait.args[0]
        if not wait.users and is_start(start):
            graph.erase_node(wait)
            if not start.users:
                above = start.all_input_nodes
                graph.erase_node(start)
                for node in above:
                    erase_dead(node)
