"""Composes two redistributions in a row, and removes unused ones.

    redistribute(redistribute(x, A -> B), B -> C)  =  redistribute(x, A -> C)

Correct because all three specs describe the same global tensor. A partial A (a sum, an average, a minimum) is reduced
on the way to B or on the way to C; the order in which ranks are added may change. If B or C is partial and the spec
before it is not, the pair stays: such a step divides, which rounds.

It pays if the direct redistribution sends less than those that it replaces: an all-reduce of which only a part is read
becomes a reduce-scatter. If the first one has other readers it stays, and the direct one has to send less than the
second alone.

    before   a = redistribute(x, P(sum) -> R); b = redistribute(a, R -> S(0))
    after    b = redistribute(x, P(sum) -> S(0))
"""

from __future__ import annotations

import torch

from dtensor_compile.compat.dtensor.specs import Partial
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import node_arg, value_of
from dtensor_compile.graph.copies import behind_copies, is_view, replace
from dtensor_compile.graph.nodes import (
    cost_of,
    is_redistribution,
    redistribute,
    redistribution_cost,
    redistribution_of,
    redistributions,
    source_line,
)
from dtensor_compile.ir.spec import parse_spec


def compose_redistributions(graph: torch.fx.Graph) -> list[Decision]:
    """Composes redistributions that follow each other in `graph`, and drops unused ones."""
    decisions = []
    for node in redistributions(graph):
        made = _compose(node)
        if made is not None:
            decisions.append(made)
    for node in reversed(list(graph.nodes)):
        if node.users or not (is_redistribution(node) or is_view(node)):
            continue
        if is_redistribution(node):
            where = source_line(node)
            decisions.append(
                Decision("compose_redistributions", where, "nobody reads it", str(redistribution_of(node)), "nothing")
            )
        graph.erase_node(node)
    return decisions


def _compose(node: torch.fx.Node) -> Decision | None:
    this, inner = redistribution_of(node), behind_copies(redistribution_of(node).local)
    if not is_redistribution(inner):
        return None
    first = redistribution_of(inner)
    if (first.target, first.mesh, first.shape) != (this.source, this.mesh, this.shape):
        return None
    if not (adds_no_partial(first.source, first.target) and adds_no_partial(this.source, this.target)):
        return None
    direct = this._replace(local=first.local, source=first.source)
    itemsize = value_of(node).element_size()
    goes = _is_only_reader(node, inner)
    before, after = cost_of([inner, node] if goes else [node]), redistribution_cost(direct, itemsize)
    if not (after.is_less(before) or after == before and goes):
        return None
    where, text = source_line(node), f"{first}->{this.target}"
    reason = f"the direct way sends {after} and not {before}" if after != before else "one step and not two"
    if not replace(node, redistribute(direct, like=node, before=node)):
        return None
    return Decision("compose_redistributions", where, reason, text, str(direct))


def adds_no_partial(source: str, target: str) -> bool:
    """Whether the target spec is partial only along mesh dims on which the source has the same partial placement."""
    return all(a == b for a, b in zip(parse_spec(source), parse_spec(target)) if isinstance(b, Partial))


def _is_only_reader(node: torch.fx.Node, inner: torch.fx.Node) -> bool:
    """Whether `inner` is unused once `node` is removed: nothing else reads it, or copies and views between the two."""
    between = node_arg(node, 0)
    while len(between.users) == 1 and between is not inner:
        between = node_arg(between, 0)
    return between is inner and len(inner.users) == 1
