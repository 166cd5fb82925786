"""Adds terms of a sum that have the same redistribution before redistributing them once.

    redistribute(x, A -> B) + redistribute(y, A -> B)  =  redistribute(x + y, A -> B)

Correct if A -> B is linear: it moves elements, and its reductions are sums or averages. If nothing is reduced, results
are bitwise the same; else the same terms are added in another order, each rank's own first. Minima, maxima and products
are left alone, and so are redistributions to a new partial placement. ``-`` and ``neg`` are exact and count as sums
with a sign; factors are not looked through, because they would round every term where they rounded the sum.

It pays if anything is sent: one collective replaces several. The local sum is over tensors in spec A, which may be
larger than those in spec B; it is fused into the operators that make them, or is bound by memory bandwidth.

    before   a = redistribute(x, P(sum) -> S(1)); b = redistribute(y, P(sum) -> S(1)); s = add(a, b)
    after    z = add(x, y); s = redistribute(z, P(sum) -> S(1))
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dtensor_compile.compat.dtensor.specs import Partial
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import node_arg, value_of
from dtensor_compile.graph.copies import is_same_view, replace
from dtensor_compile.graph.nodes import (
    RedistributeNode,
    call_before,
    cost_of,
    is_redistribution,
    redistribute,
    redistribution_of,
    runs_when,
    source_line,
)
from dtensor_compile.graph.operator_traits import TWO_TERM_SUMS
from dtensor_compile.graph.rank_uniformity import equal, has_same_shape, may_use_sizes
from dtensor_compile.ir.spec import parse_spec

aten = torch.ops.aten

#: A term of a sum: the node, and whether it is subtracted.
Term = tuple[torch.fx.Node, bool]


def merge_sums(graph: torch.fx.Graph) -> list[Decision]:
    """Merges redistributions of terms of one sum in `graph`."""
    decisions: list[Decision] = []
    inner: set[torch.fx.Node] = set()  # sums that are terms of a larger one, and views between them
    for root in reversed(list(graph.nodes)):
        if root in inner or not _is_sum(root):
            continue
        terms = list(_terms(root, root, False, inner))
        decisions += _merge(root, terms)
    return decisions


def _is_sum(node: torch.fx.Node) -> bool:
    """Whether a node adds or subtracts two tensors of the same shape and dtype as its result, with factor 1."""
    if node.target not in TWO_TERM_SUMS or node.kwargs.get("alpha", 1) != 1:
        return False
    value = node.meta.get("val")
    terms = [argument for argument in node.args if isinstance(argument, torch.fx.Node)]
    others = [other for term in terms if isinstance(other := term.meta.get("val"), torch.Tensor)]
    if not isinstance(value, torch.Tensor) or len(others) < len(node.args):
        return False
    if not all(other.dtype == value.dtype for other in others):
        return False
    return has_same_shape(*terms) and (not may_use_sizes() or equal(others[0].shape, value.shape))


def _terms(node: torch.fx.Node, root: torch.fx.Node, negative: bool, inner: set[torch.fx.Node]) -> Iterator[Term]:
    """The terms of the sum that ends in `root`, from left to right; any node with other readers is a term."""
    pending = [(node, negative)]
    while pending:
        node, negative = pending.pop()
        if node is root or len(node.users) == 1 and runs_when(node) == runs_when(root):
            inner.add(node)
            if _is_sum(node):
                pending += [
                    (node_arg(node, 1), negative != (node.target is aten.sub.Tensor)),
                    (node_arg(node, 0), negative),
                ]
                continue
            if node.target is aten.neg.default:
                pending.append((node_arg(node, 0), not negative))
                continue
            if is_same_view(node):
                pending.append((node_arg(node, 0), negative))
                continue
        yield node, negative


def is_linear(this: RedistributeNode) -> bool:
    """Whether the redistribution of a sum is the sum of the redistributions."""
    source, target = parse_spec(this.source), parse_spec(this.target)
    reduces = all(p.reduce_op in ("sum", "avg") for p in source if isinstance(p, Partial))
    return reduces and all(a == b for a, b in zip(source, target) if isinstance(b, Partial))


def _merge(root: torch.fx.Node, terms: list[Term]) -> list[Decision]:
    groups: dict[tuple, list[Term]] = {}
    for node, negative in terms:
        if (
            is_redistribution(node)
            and len(node.users) == 1
            and runs_when(node) == runs_when(root)
            and is_linear(redistribution_of(node))
        ):
            groups.setdefault((*redistribution_of(node)[1:], value_of(redistribution_of(node).local).dtype), []).append(
                (node, negative)
            )
    merged = {node: group for group in groups.values() if len({n for n, _ in group}) > 1 for node, _ in group}
    merged = {node: group for node, group in merged.items() if cost_of([node]).bytes}
    if not merged:
        return []
    decisions, total, done = [], None, set()
    for node, negative in terms:
        if node in done:
            continue
        if node in merged:
            nodes = list(dict.fromkeys(n for n, _ in merged[node]))
            done.update(nodes)
            local = _sum([(redistribution_of(n).local, sign) for n, sign in merged[node]], root)
            one = redistribute(redistribution_of(node)._replace(local=local), like=node, before=root)
            reason = f"{len(nodes)} terms of one sum are sent as one: {cost_of(nodes)} become {cost_of([one])}"
            decisions += [
                Decision("merge_sums", source_line(n), reason, str(redistribution_of(n)), f"one with {node.name}")
                for n in nodes
            ]
            node, negative = one, False
        total = _sum([(node, negative)] if total is None else [(total, False), (node, negative)], root)
    assert total is not None
    return decisions if replace(root, total) else []


def _sum(terms: list[Term], before: torch.fx.Node) -> torch.fx.Node:
    """The sum of the terms, from left to right."""
    total, negative = terms[0]
    if negative:
        total = call_before(aten.neg.default, (total,), like=before, before=before)
    for node, negative in terms[1:]:
        total = call_before(aten.sub.Tensor if negative else aten.add.Tensor, (total, node), like=before, before=before)
    return total
