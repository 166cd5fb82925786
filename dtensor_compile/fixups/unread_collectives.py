"""Drops unused collectives of DTensor itself from a joint graph.

DTensor's operators redistribute their arguments with collectives that are not redistribute nodes: a norm is summed
again for every reader, and once more if only its shape is needed. The results of some are unused, and torch never drops
a wait for a collective.

    before   n = pow(sum(x * x), 0.5); a = wait(reduce_scatter(n * n)); b = wait(reduce_scatter(n * n)); return b
    after    n = pow(sum(x * x), 0.5); b = wait(reduce_scatter(n * n)); return b

A collective that the program itself calls stays, since another rank may count on it.

Upstream: https://github.com/pytorch/pytorch/issues/130918 ([torch.compile][distributed] Collective ops in FX graph
    should not be erased by DCE pass even its result is not used in current rank; closed, torch keeps them on purpose);
    https://github.com/pytorch/pytorch/issues/126773 (Give`wait_tensor()` a schema that reflects its side effect).
Releases: 2.11 to 2.15.
Remove when: a collective can be marked as free of side effects, and DTensor marks those that it issues for itself.
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
    """Erases unused waits, their collectives, and operands that only those read, from the joint graph of a program
    without collectives of its own.
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
