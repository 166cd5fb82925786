"""Drops views that show a tensor as it is: ``detach``, views in the same shape, transposes of transposes.

    before   d = detach(x); y = mm(t(t(w)), view(d, d.shape))
    after    y = mm(w, x)

Autograd, and the functions around blocks that are compiled once, leave them between operators; each later stage would
look at them, and the partitioner save some of them beside their originals. Views that are outputs stay, since
AOTAutograd has noted what they alias, and so do those that an operator writes to.
"""

from __future__ import annotations

import torch

from dtensor_compile.graph.arguments import node_arg
from dtensor_compile.graph.copies import erase_dead, is_same_view
from dtensor_compile.graph.operator_traits import is_mutable, transposes


def drop_views(graph: torch.fx.Graph) -> None:
    """Replaces views in `graph` that are as their originals by these."""
    for node in list(graph.nodes):
        original = _original(node)
        if original is None or any(user.op == "output" or is_mutable(user.target) for user in node.users):
            continue
        node.replace_all_uses_with(original)
        erase_dead(node)


def _original(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node that `node` is a view of in the same shape and strides; None if it is something else."""
    if is_same_view(node):
        return node_arg(node, 0)
    if transposes(node) and isinstance(inner := node.args[0], torch.fx.Node) and transposes(inner):
        return node_arg(inner, 0)
    return None
