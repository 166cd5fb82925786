"""Copies in place of removed nodes.

A redistribution returns a new tensor. If its reader gets another node of the graph instead, it gets a copy; otherwise
an output of the graph could be an input or another output, and a change of the one would change the other. Inductor
drops the copies that are indistinguishable from the original.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from dtensor_compile.graph.arguments import function_of, node_arg, value_of
from dtensor_compile.graph.global_annotations import MARK
from dtensor_compile.graph.node_builder import add_call, inherited
from dtensor_compile.graph.operator_traits import SHAPE_VIEWS, SPLITS
from dtensor_compile.graph.rank_uniformity import equal, mark_of, may_use_sizes

_clone = torch.ops.aten.clone.default
_permute = torch.ops.aten.permute.default


def behind_copies(node: Any) -> Any:
    """The node with the values and shape of `node` behind copies and views of the same shape: `node` itself if there
    are none."""
    while isinstance(node, torch.fx.Node) and (node.target is _clone or is_same_view(node)):
        node = node.args[0]
    return node


def is_same_view(node: Any) -> bool:
    """Whether a node is a view of its input in the same shape and strides."""
    if not isinstance(node, torch.fx.Node) or node.target not in SHAPE_VIEWS:
        return False
    if not may_use_sizes():
        mark = mark_of(node)
        return mark is not None and mark == mark_of(node.args[0])
    was, now = node_arg(node, 0).meta.get("val"), node.meta.get("val")
    return was is not None and now is not None and equal(was.shape, now.shape) and equal(_wide(was), _wide(now))


def _wide(value: torch.Tensor) -> list[Any]:
    """The strides that matter for the layout: those of dims with more than one element."""
    return [stride for size, stride in zip(value.shape, value.stride()) if not statically_known_true(size == 1)]


def is_view(node: torch.fx.Node) -> bool:
    """Whether a node is one view of one tensor, its first argument."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return target.is_view or target is torch.ops.aten._unsafe_view.default


def can_copy(original: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether a copy of `original` can have the strides of `node`, for which its readers were traced.

    Strides of dims of size 1 are ignored, so that a rank with a single row decides as the others do.
    """
    was, now = node.meta.get("val"), original.meta.get("val")
    return (
        was is None or now is None or equal(was.stride(), torch.clone(now).stride()) or _order_of_dims(was) is not None
    )


def replace_by_copy(node: torch.fx.Node, original: torch.fx.Node) -> None:
    """Replaces `node` by a copy of `original` with the strides of `node`, and erases `node`."""
    was, now = node.meta.get("val"), original.meta.get("val")
    meta = inherited(node, (MARK,))

    def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        with node.graph.inserting_before(node):
            return add_call(node.graph, target, args, kwargs, meta=meta)

    if was is None or now is None:
        with node.graph.inserting_before(node):
            new = node.graph.call_function(_clone, (original,))
        new.meta = dict(node.meta)
    elif equal(was.stride(), torch.clone(now).stride()):
        new = call(_clone, original)
    else:
        order = _order_of_dims(was)
        assert order is not None, "see can_copy"
        if order == sorted(order):
            new = call(_clone, original, memory_format=torch.contiguous_format)
        else:
            copy = call(_clone, call(_permute, original, order), memory_format=torch.contiguous_format)
            new = call(_permute, copy, [order.index(dim) for dim in range(len(order))])
        # Symbolic ones are contiguous, both, and not numbers that could be arguments.
        numbers = all(type(number) is int for number in (*was.shape, *was.stride()))
        if numbers and not equal(was.stride(), value_of(new).stride()):
            new = call(torch.ops.aten.as_strided.default, new, list(was.shape), list(was.stride()))
    new.meta[MARK] = mark_of(node)
    node.replace_all_uses_with(new)
    erase_dead(node)


def _order_of_dims(value: torch.Tensor) -> list[int] | None:
    """The order of dims in which a tensor is dense; None if there is none.

    Dims of size 1 fit anywhere; without elements, all do.
    """
    if not all(type(number) is int for number in (*value.shape, *value.stride())):
        return list(range(value.dim())) if value.is_contiguous() else None
    natural = list(range(value.dim()))
    strides = value.stride()
    orders = (natural, sorted(natural, key=lambda dim: (-strides[dim], -value.shape[dim])))
    for fits in (natural, [dim for dim in natural if value.shape[dim] > 1]):
        for order in orders:
            step = 1
            for dim in (dim for dim in reversed(order) if dim in fits):
                if strides[dim] != step and value.numel():
                    break
                step *= value.shape[dim]
            else:
                return order
    return None


def replace(node: torch.fx.Node, new: torch.fx.Node, *, shared: bool = False) -> bool:
    """Replaces `node` by `new`, in the strides of `node` or in others that its readers do not notice; erases unused
    nodes.

    Args:
        shared: whether `new`, or its view base, has other readers.

    Returns False, and erases `new`, if a copy cannot have the strides.
    """
    was, now = node.meta["val"], new.meta["val"]
    assert was.dtype == now.dtype and was.dim() == now.dim(), f"{new} does not stand for {node}"
    if not shared and equal(was.stride(), now.stride()):
        node.replace_all_uses_with(new)
        erase_dead(node)
        return True
    if can_copy(new, node):
        replace_by_copy(node, new)
        return True
    changed = None if shared else _with_other_strides(node, now)
    if changed is None:
        erase_dead(new)
        return False
    for reader, value in changed.items():
        reader.meta["val"] = value
    node.replace_all_uses_with(new)
    erase_dead(node)
    return True


def can_be_dense(node: torch.fx.Node) -> bool:
    """Whether `replace` can put a contiguous tensor in the place of `node`."""
    value = node.meta["val"]
    return (
        _order_of_dims(value) is not None
        or _with_other_strides(node, torch.empty_like(value, memory_format=torch.contiguous_format)) is not None
    )


def _with_other_strides(node: torch.fx.Node, value: torch.Tensor) -> dict[torch.fx.Node, Any] | None:
    """Fake values of `node` and its views if it has the strides of `value`; None if a reader would notice."""
    changed: dict[torch.fx.Node, Any] = {node: value}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if not _may_run_again(user):
                return None
            args, kwargs = map_arg((user.args, user.kwargs), lambda n: changed.get(n, n.meta.get("val")))
            try:
                now = function_of(user)(*args, **kwargs)
            except RuntimeError:
                return None  # a view that does not exist in other strides
            if _is_laid_out_as(user.meta["val"], now):
                continue
            if not is_view(user) and user.target is not operator.getitem and user.target not in SPLITS:
                return None
            changed[user] = now
            pending.append(user)
    return changed


#: Operators whose fake run has side effects, or does not determine the result.
_ONCE = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def _may_run_again(node: torch.fx.Node) -> bool:
    """Whether a fake run of a node determines its result for any strides of its operands."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return node.target is not torch.ops.aten.as_strided.default and not any(tag in node.target.tags for tag in _ONCE)


def _is_laid_out_as(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return all(map(_is_laid_out_as, a, b))
    return not isinstance(a, torch.Tensor) or equal(a.shape, b.shape) and equal(a.stride(), b.stride())


def erase_dead(node: torch.fx.Node) -> None:
    """Erases an unused node and operands that only it reads; keeps inputs and nodes with side effects."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node.users or node.op != "call_function" or node._erased or node.is_impure():
            continue
        pending += node.all_input_nodes
        node.graph.erase_node(node)
