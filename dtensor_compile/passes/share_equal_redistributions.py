"""Shares one node between equal redistributions of one tensor.

    f(redistribute(x, A -> B)), g(redistribute(x, A -> B))  =  f(y), g(y)  with  y = redistribute(x, A -> B)

Correct because the operator is a function of its arguments and its result is never written to: the graph is functional
here.

It always saves bytes. The result lives until its last reader; if a backward reader would keep it alive from the
forward, the partitioner decides between saving and recomputing it.

    before   q = mm(redistribute(x, S(0) -> R), wq); k = mm(redistribute(x, S(0) -> R), wk)
    after    a = redistribute(x, S(0) -> R); q = mm(a, wq); k = mm(clone(a), wk)
"""

from __future__ import annotations

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.copies import behind_copies, can_copy, replace_by_copy
from dtensor_compile.graph.nodes import redistribution_of, redistributions, source_line


def share_equal_redistributions(graph: torch.fx.Graph) -> list[Decision]:
    """Makes equal redistributions in `graph` one node, the first of them."""
    first: dict[tuple, torch.fx.Node] = {}
    decisions = []
    for node in redistributions(graph):
        this = redistribution_of(node)
        key = (behind_copies(this.local), *this[1:])
        earlier = first.setdefault(key, node)
        if earlier is not node and can_copy(earlier, node):
            decisions.append(
                Decision(
                    "share_equal_redistributions", source_line(node), f"equal to {earlier.name}", str(this), "shared"
                )
            )
            replace_by_copy(node, earlier)
    return decisions
