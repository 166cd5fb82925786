"""Sends tensors that are cast to or from a narrower dtype in the narrower dtype.

    cast(redistribute(x, A -> B), narrow)  =  redistribute(cast(x, narrow), A -> B)
    redistribute(cast(y, wide), A -> B)    =  cast(redistribute(y, A -> B), wide)

Bitwise the same if nothing is reduced, because a cast is elementwise: `send_in_narrow_dtype`. If A is a partial sum, it
would be added up in the narrow dtype, which rounds more: `reduce_in_narrow_dtype`, which is opt-in. Views between the
redistribution and the casts move along.

It pays if anything is sent. A redistribution with a reader in the wide dtype stays as it is.

    before   w = redistribute(shard, S(0) -> R); v = view(w, [64, 64]); b = _to_copy(v, bfloat16)
    after    s = _to_copy(shard, bfloat16); w = redistribute(s, S(0) -> R); b = view(w, [64, 64])
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import node_arg, value_of
from dtensor_compile.graph.copies import behind_copies, is_view, replace
from dtensor_compile.graph.nodes import (
    RedistributeNode,
    call_before,
    redistribute,
    redistribution_cost,
    redistribution_of,
    redistributions,
    source_line,
)
from dtensor_compile.graph.rank_uniformity import mark_of

aten = torch.ops.aten


def send_in_narrow_dtype(graph: torch.fx.Graph) -> list[Decision]:
    """Moves casts in `graph` across redistributions that reduce nothing."""
    return [
        made
        for node in redistributions(graph)
        if not _has_partial(redistribution_of(node))
        for made in _narrow("send_in_narrow_dtype", node)
    ]


def reduce_in_narrow_dtype(graph: torch.fx.Graph) -> list[Decision]:
    """Moves casts in `graph` across redistributions that sum; sums are rounded in the narrower dtype."""
    return [
        made
        for node in redistributions(graph)
        if _has_partial(redistribution_of(node))
        for made in _narrow("reduce_in_narrow_dtype", node)
    ]


def _has_partial(this: RedistributeNode) -> bool:
    return "P(" in this.source + this.target


def _narrow(name: str, node: torch.fx.Node) -> list[Decision]:
    return _cast_before(name, node) or _cast_after(name, node)


def _cast_before(name: str, node: torch.fx.Node) -> list[Decision]:
    """Redistributions whose readers all cast to one narrower dtype."""
    ends = [(user, path) for user, path in _readers(node, ())]
    dtypes = {value_of(user).dtype if _is_cast(user) else None for user, _ in ends}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype is None or not _is_narrower(dtype, value_of(node).dtype):
        return []
    this = redistribution_of(node)
    decision = _decision(name, node, dtype)
    if decision is None:
        return []
    cast = call_before(aten._to_copy.default, (this.local,), {"dtype": dtype}, like=ends[0][0], before=node)
    sent = redistribute(this._replace(local=cast), like=node, before=node)
    for user, path in ends:
        new = sent
        for view in path:
            new = call_before(
                view.target, (new, *view.args[1:]), view.kwargs, like=view, before=user, mark=mark_of(view)
            )
        if not replace(user, new, shared=len(ends) > 1):
            raise ValueError(f"{user.name} has strides that a copy cannot have")
    return [decision]


def _cast_after(name: str, node: torch.fx.Node) -> list[Decision]:
    """Redistributions of tensors that were cast from a narrower dtype."""
    this = redistribution_of(node)
    cast = behind_copies(this.local)
    if not _is_cast(cast) or not _is_narrower(value_of(node_arg(cast, 0)).dtype, value_of(node).dtype):
        return []
    decision = _decision(name, node, value_of(node_arg(cast, 0)).dtype)
    if decision is None:
        return []
    sent = redistribute(this._replace(local=cast.args[0]), like=node, before=node)
    wide = call_before(aten._to_copy.default, (sent,), {"dtype": value_of(node).dtype}, like=cast, before=node)
    return [decision] if replace(node, wide) else []


def _readers(
    node: torch.fx.Node, path: tuple[torch.fx.Node, ...]
) -> Iterator[tuple[torch.fx.Node, tuple[torch.fx.Node, ...]]]:
    """The readers of a node behind views of it, and the views on the way."""
    for user in node.users:
        if is_view(user) and user.target is not aten.view.dtype:
            yield from _readers(user, (*path, user))
        else:
            yield user, path


def _is_cast(node: object) -> bool:
    """Whether a node does nothing but change the dtype."""
    if not isinstance(node, torch.fx.Node) or node.target is not aten._to_copy.default:
        return False
    was, now = value_of(node_arg(node, 0)), value_of(node)
    same = (was.device, was.layout) == (now.device, now.layout)
    return (
        same and not node.kwargs.get("pin_memory") and node.kwargs.get("memory_format") in (None, torch.preserve_format)
    )


def _is_narrower(narrow: torch.dtype, wide: torch.dtype) -> bool:
    return narrow.itemsize < wide.itemsize and narrow.is_floating_point and wide.is_floating_point


def _decision(name: str, node: torch.fx.Node, dtype: torch.dtype) -> Decision | None:
    this, wide = redistribution_of(node), value_of(node).dtype
    before, after = redistribution_cost(this, wide.itemsize), redistribution_cost(this, dtype.itemsize)
    if not after.is_less(before):
        return None
    narrow = str(dtype).removeprefix("torch.")
    return Decision(
        name, source_line(node), f"sent as {narrow}: {after} and not {before}", str(this), f"{this} in {narrow}"
    )
