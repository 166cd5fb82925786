"""Copies in place of nodes that go away.

A redistribution gives a new tensor. Where its reader gets another node of the graph instead, it gets a copy of that, or an output
of the graph would be an input or another output, and a change of the one would change the other. Inductor drops the copies that
nobody can tell from the original.
"""

from __future__ import annotations

from typing import Any

import torch

_clone = torch.ops.aten.clone.default
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def behind_copies(node: Any) -> Any:
    """The node whose values and shape `node` has: itself, or what it is a copy or a view of the same shape of."""
    while isinstance(node, torch.fx.Node) and (node.target is _clone or is_same_view(node)):
        node = node.args[0]
    return node


def is_same_view(node: Any) -> bool:
    """Whether a node is a view of its input in the same shape and strides."""
    if not isinstance(node, torch.fx.Node) or node.target not in _VIEWS:
        return False
    was, now = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    return was is not None and now is not None and was.shape == now.shape and was.stride() == now.stride()


def can_copy(original: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether a copy of `original` can have the strides of `node`, for which its readers were traced."""
    was, now = node.meta.get("val"), original.meta.get("val")
    return was is None or now is None or was.is_contiguous() or was.stride() == torch.clone(now).stride()


def replace_by_copy(node: torch.fx.Node, original: torch.fx.Node) -> None:
    """Readers of `node` read a copy of `original` with the strides of `node`; `node` goes away."""
    was, now = node.meta.get("val"), original.meta.get("val")
    same = was is None or now is None or was.stride() == now.stride()
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(_clone, (original,), {} if same else {"memory_format": torch.contiguous_format})
    copy.meta = dict(node.meta)
    node.replace_all_uses_with(copy)
    erase_unused(node, original)


def erase_unused(node: Any, until: torch.fx.Node) -> None:
    """Erases `node` and the redistributions and copies that it was made of, back to `until`, where nobody else reads them."""
    while node is not until and not node.users:
        source = node.args[0]
        node.graph.erase_node(node)
        node = source
