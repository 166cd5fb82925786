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


def is_view(node: torch.fx.Node) -> bool:
    """Whether a node is one view of one tensor, its first argument."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return (target.is_view or target is torch.ops.aten._unsafe_view.default)


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
    erase_dead(node)


def replace(node: torch.fx.Node, new: torch.fx.Node, *, shared: bool = False) -> bool:
    """Readers of `node` read `new`, in the strides of `node`; what nobody reads then goes away.

    Args:
        shared: `new`, or what it is a view of, has other readers.

    Returns False where the strides cannot be had; then `new` goes away.
    """
    was, now = node.meta["val"], new.meta["val"]
    assert (was.shape, was.dtype) == (now.shape, now.dtype), f"{node} is {was.shape} {was.dtype}, {new} is {now.shape} {now.dtype}"
    if not shared and was.stride() == now.stride():
        node.replace_all_uses_with(new)
        erase_dead(node)
        return True
    if not can_copy(new, node):
        erase_dead(new)
        return False
    replace_by_copy(node, new)
    return True


def erase_dead(node: torch.fx.Node) -> None:
    """Erases a node that nobody reads, and those that it alone was made of; inputs, and what acts on more than its result, stay."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node.users or node.op != "call_function" or node._erased or node.is_impure():
            continue
        pending += node.all_input_nodes
        node.graph.erase_node(node)
