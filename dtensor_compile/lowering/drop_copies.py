"""Copies that nobody can tell from their original go away.

    clone(x) = x        where nobody writes to either, and they are not both seen from outside

Other passes put a copy where a node goes away, so that no output of the graph becomes another one (`passes/copies.py`). Between
two operators of the graph there is nothing to protect, and the copy would be made, and kept for the backward beside its original.

    before   g = redistribute(x, S(1)->R); q = mm(g, wq); k = mm(clone(g), wk)
    after    g = redistribute(x, S(1)->R); q = mm(g, wq); k = mm(g, wk)

Pays always: no byte is written for it. Left alone: copies with other strides, copies of inputs (the program may write to those
between forward and backward), copies that are outputs, and memory that an operator of the graph writes to.
"""

from __future__ import annotations

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.lowering.extra_copies import VIEWS
from dtensor_compile.passes.nodes import source_line

_clone = torch.ops.aten.clone.default


def drop_copies(graph: torch.fx.Graph) -> list[Decision]:
    """Readers of a copy in `graph` read its original."""
    seen = set(map(_memory, (node for output in graph.find_nodes(op="output") for node in output.all_input_nodes)))
    written = set(map(_memory, (argument for node in graph.nodes if _writes(node) for argument in node.all_input_nodes)))
    decisions = []
    for node in graph.find_nodes(op="call_function", target=_clone):
        original = node.args[0]
        memory = _memory(original)
        is_told_apart = node in seen or memory.op != "call_function" or not written.isdisjoint((node, memory))
        if is_told_apart or not _same_layout(original, node):
            continue
        reason = f"nobody can tell it from {original.name}"
        decisions.append(Decision("drop_copies", source_line(node), reason, "copied", "read in place"))
        node.replace_all_uses_with(original)
        graph.erase_node(node)
    return decisions


def _memory(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory a node is a view of. (Fake values say it only where no pass has put another node in front.)"""
    while node.target in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _same_layout(original: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether all elements lie alike; without symbolic sizes, about which a guard would be made."""
    was, now = original.meta["val"].stride(), node.meta["val"].stride()
    return all(type(number) is int for number in (*was, *now)) and was == now
