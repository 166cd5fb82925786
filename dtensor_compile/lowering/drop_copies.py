"""Drops redundant copies of results of redistributions.

    clone(g) = g        if nothing writes to either, and the copy is not an output

Other passes replace redistributions by copies, so that no output of the graph aliases another one (`graph/copies.py`).
Between two operators of the graph there is nothing to protect, and the copy would be made, and saved for the backward
beside its original.

    before   g = redistribute(x, S(1)->R); q = mm(g, wq); k = mm(clone(g), wk)
    after    g = redistribute(x, S(1)->R); q = mm(g, wq); k = mm(g, wk)

It always pays: fewer bytes are written. Results of collectives are contiguous on every rank, for all sizes, so that
ranks make the same decision if shards are uneven. Left alone: copies that are outputs, and memory that an operator of
the graph writes to.
"""

from __future__ import annotations

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import node_arg
from dtensor_compile.graph.extra_copies import sends
from dtensor_compile.graph.nodes import is_redistribution, source_line
from dtensor_compile.graph.operator_traits import VIEWS, is_mutable

_clone = torch.ops.aten.clone.default


def drop_copies(graph: torch.fx.Graph) -> list[Decision]:
    """Replaces copies in `graph` by their originals."""
    seen = set(map(_memory, (node for output in graph.find_nodes(op="output") for node in output.all_input_nodes)))
    written = set(
        map(_memory, (argument for node in graph.nodes if is_mutable(node.target) for argument in node.all_input_nodes))
    )
    decisions = []
    for node in graph.find_nodes(op="call_function", target=_clone):
        original = node_arg(node, 0)
        if not is_redistribution(original) or node in seen or not written.isdisjoint((node, original)):
            continue
        if not _is_contiguous(node) or not sends(original):
            continue
        reason = f"nothing distinguishes it from {original.name}"
        decisions.append(Decision("drop_copies", source_line(node), reason, "copied", "read in place"))
        node.replace_all_uses_with(original)
        graph.erase_node(node)
    return decisions


def _is_contiguous(node: torch.fx.Node) -> bool:
    """Whether a copy of a contiguous tensor is contiguous."""
    return node.kwargs.get("memory_format") in (None, torch.preserve_format, torch.contiguous_format)


def _memory(node: torch.fx.Node) -> torch.fx.Node:
    """The view base of a node. (Fake values determine it only if no pass has replaced a node in between.)"""
    while node.target in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
