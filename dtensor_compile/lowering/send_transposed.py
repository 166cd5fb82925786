"""Sends matrices that are gathered or scattered along their columns as transposes, if only matmuls read or make them.

A collective returns the chunks of its ranks one after the other, whereas columns are interleaved: W (O, I) gathered
from (O, I/n) is copied once more as a whole. Its transpose is gathered by rows, and a matmul reads either:

    gather(W, columns) = gather(W^T, rows)^T        scatter(A B, columns) = scatter(B^T A^T, rows)^T

Instead the shard is copied, 1/n of the matrix, and that copy is fused into a kernel that writes or reads it, if any.

    before   w = redistribute(x, S(1)->R, [O, I]); y = mm(a, t(w))
    after    w = redistribute(t(x), S(0)->R, [I, O]); y = mm(a, w)

    before   g = redistribute(mm(a, b), P(sum)->S(1), [O, I])
    after    g = clone(t(redistribute(mm(t(b), t(a)), P(sum)->S(0), [I, O])))

It always pays. Results are those of the same matmuls with other strides. Left alone: symbolic and uneven sizes, with a
decision each, columns that another mesh dim shards too, and matrices that anything else reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq

from dtensor_compile.compat.dtensor.specs import Shard
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import node_arg, value_of
from dtensor_compile.graph.extra_copies import bytes_of
from dtensor_compile.graph.nodes import (
    RedistributeNode,
    call_before,
    redistribute,
    redistribution_of,
    redistributions,
    source_line,
)
from dtensor_compile.graph.operator_traits import SHAPE_VIEWS, transposes
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.lowering.order_rows import moved, why_sizes_do_not_fit

aten = torch.ops.aten


def send_transposed(graph: torch.fx.Graph) -> list[Decision]:
    """Gathers and scatters the columns of matrices of `graph` as rows of their transposes."""
    decisions = list(columns_left(graph))
    for node in redistributions(graph):
        this = redistribution_of(node)
        if not _sends_columns(node) or why_sizes_do_not_fit(node) or not value_of(node).numel():
            continue
        gathers = _gathers(node)
        if gathers and not _is_read_by_matmuls(node):
            continue
        made = _gather(node, this) if gathers else _scatter(node, this)
        if made is None:
            continue
        decisions.append(
            Decision("send_transposed", source_line(node), "columns are sent as rows of the transpose", str(this), made)
        )
        graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.target is not aten.mm.default and not _is_view(node))
    return decisions


def columns_left(graph: torch.fx.Graph, because: str = "") -> Iterator[Decision]:
    """A decision for each gather and scatter of columns that is left alone, with the bytes that are copied for it.

    Args:
        because: the reason to leave all of them alone; empty if only those of uneven or symbolic sizes are.
    """
    for node in redistributions(graph):
        reason = because or why_sizes_do_not_fit(node)
        if not reason or not _sends_columns(node):
            continue
        local = redistribution_of(node).local
        if _is_read_by_matmuls(node) if _gathers(node) else _made_by_matmul(local)[0] is not None:
            reason, text = f"its columns are copied whole: {reason}", str(redistribution_of(node))
            copied = max(bytes_of(node), bytes_of(local))
            yield Decision("send_transposed", source_line(node), reason, text, text, left_alone=True, bytes=copied)


def _sends_columns(node: torch.fx.Node) -> bool:
    """Whether a redistribution gathers or reduce-scatters the columns of a matrix."""
    this = redistribution_of(node)
    return len(this.shape) == 2 and (moved(this.source, this.target, parse_mesh(this.mesh).shape) or (0, 0))[1] == 1


def _gathers(node: torch.fx.Node) -> bool:
    return bytes_of(node) > bytes_of(redistribution_of(node).local)


def _gather(node: torch.fx.Node, this: RedistributeNode) -> str:
    sent = call_before(aten.permute.default, (this.local, [1, 0]), like=node, before=node)
    whole = redistribute(_transposed(this, sent), like=node, before=node)
    node.replace_all_uses_with(call_before(aten.permute.default, (whole, [1, 0]), like=node, before=node))
    return str(redistribution_of(whole))


def _scatter(node: torch.fx.Node, this: RedistributeNode) -> str | None:
    matmul, flipped = _made_by_matmul(this.local)
    if matmul is None:
        return None
    if not flipped:
        left, right = (
            call_before(aten.permute.default, (factor, [1, 0]), like=matmul, before=node) for factor in matmul.args
        )
        matmul = call_before(aten.mm.default, (right, left), like=matmul, before=node)
    part = redistribute(_transposed(this, matmul), like=node, before=node)
    back = call_before(aten.permute.default, (part, [1, 0]), like=node, before=node)
    node.replace_all_uses_with(
        call_before(aten.clone.default, (back,), {"memory_format": torch.contiguous_format}, like=node, before=node)
    )
    return str(redistribution_of(part))


def _transposed(this: RedistributeNode, local: torch.fx.Node) -> RedistributeNode:
    """The same redistribution of the transpose, `local`."""
    source, target = (
        spec_text([Shard(1 - p.dim) if isinstance(p, Shard) else p for p in parse_spec(text)])
        for text in (this.source, this.target)
    )
    return RedistributeNode(local, source, target, this.mesh, tuple(reversed(this.shape)))


def _is_view(node: torch.fx.Node) -> bool:
    """Whether a node is a matrix or its transpose, as a view."""
    if node.target is aten.t.default or node.target is aten.permute.default:
        return value_of(node).dim() == 2
    if node.target not in SHAPE_VIEWS:
        return False
    # Unbacked sizes are equal if their expressions are.
    return guard_or_false(sym_eq(list(value_of(node).shape), list(value_of(node_arg(node, 0)).shape)))


def _is_read_by_matmuls(node: torch.fx.Node) -> bool:
    """Whether only matmuls read a node, behind views."""
    return all(_is_read_by_matmuls(user) if _is_view(user) else user.target is aten.mm.default for user in node.users)


def _made_by_matmul(node: Any) -> tuple[torch.fx.Node | None, bool]:
    """The matmul of which only this node is a view, and whether the view is a transpose; None if there is none."""
    flipped = False
    while isinstance(node, torch.fx.Node) and len(node.users) == 1:
        if node.target is aten.mm.default:
            return node, flipped
        if not _is_view(node):
            break
        flipped ^= transposes(node)
        node = node.args[0]
    return None, False
