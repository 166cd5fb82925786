"""Composes two redistributions that have only unary operators between them.

    redistribute(f(redistribute(x, A -> B)), B' -> C)  =  redistribute(f'(x), A' -> C)

Correct by the algebra of ``algebra.py``: f consists of unary operators that mean the same on every rank, and f' is f on
the local tensor of A. Results are bitwise the same if nothing is reduced; else the same terms are added in another
order.

It pays if the direct redistribution sends less than both: a sequence that is gathered, split into heads and sharded by
heads becomes an all-to-all; a tensor that is gathered and sharded the same way is not sent at all.

    before   a = redistribute(x, S(1) -> R); h = view(a, [4, 32, 8, 16]); y = redistribute(h, R -> S(2))
    after    h = view(x, [4, 8, 8, 16]); y = redistribute(h, S(1) -> S(2))
"""

from __future__ import annotations

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import value_of
from dtensor_compile.graph.copies import replace
from dtensor_compile.graph.nodes import (
    cost_of,
    is_redistribution,
    redistribute,
    redistribution_cost,
    redistribution_of,
    redistributions,
    runs_when,
    source_line,
)
from dtensor_compile.passes.compose_redistributions import adds_no_partial
from dtensor_compile.passes.unary_chain import chain

#: Maximum number of operators between the two.
LONGEST = 16


def compose_across_operators(graph: torch.fx.Graph) -> list[Decision]:
    """Composes redistributions in `graph` that have only unary operators between them."""
    return [made for node in redistributions(graph) if (made := _compose(node)) is not None]


def _compose(node: torch.fx.Node) -> Decision | None:
    this = redistribution_of(node)
    inner, between = this.local, list[torch.fx.Node]()
    while not is_redistribution(inner):
        if (
            len(between) == LONGEST
            or len(inner.users) != 1
            or len(inner.all_input_nodes) != 1
            or runs_when(inner) != runs_when(node)
        ):
            return None
        between.insert(0, inner)
        inner = inner.all_input_nodes[0]
    first = redistribution_of(inner)
    if not between or len(inner.users) != 1 or runs_when(inner) != runs_when(node) or first.mesh != this.mesh:
        return None
    if not (adds_no_partial(first.source, first.target) and adds_no_partial(this.source, this.target)):
        return None
    moved = chain(first, between)
    if moved is None or (moved.wanted.spec, moved.wanted.shape) != (this.source, this.shape):
        return None
    held = moved.held
    if not adds_no_partial(held.spec, this.target):
        return None
    direct = this._replace(source=held.spec)
    after, before = redistribution_cost(direct, value_of(node).element_size()), cost_of([inner, node])
    if not after.is_less(before):
        return None
    where, text = source_line(node), f"{first}->{this}"
    local = moved.apply(first.local, node)
    same = direct.source == direct.target
    new = local if same else redistribute(direct._replace(local=local), like=node, before=node)
    if not replace(node, new, shared=same):
        return None
    reason = f"across the operators between the two ({len(between)}): {after} and not {before}"
    return Decision("compose_across_operators", where, reason, text, str(direct))
