"""Moves reductions of redistributed tensors in front of the redistribution.

    sum(redistribute(x, A -> B), dims)  =  redistribute(sum(x, dims), A' -> B')

Correct by the algebra of ``algebra.py``; A' is a partial sum along mesh dims on which A shards one of the dims. Other
unary operators between the two move along. Sums add the same terms in another order; if a narrow dtype would round
between a local sum and the sum over ranks, everything stays. Maxima and minima are bitwise the same.

It pays as the reduction makes the tensor smaller: the gather of a tensor becomes the all-reduce of a number.

    before   w = redistribute(x, S(0) -> R); s = sum(w, [0, 1])
    after    p = sum(x, [0, 1]); s = redistribute(p, P(sum) -> R)
"""

from __future__ import annotations

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import value_of
from dtensor_compile.graph.copies import replace
from dtensor_compile.graph.nodes import (
    RedistributeNode,
    cost_of,
    redistribute,
    redistribution_cost,
    redistribution_of,
    redistributions,
    runs_when,
    source_line,
)
from dtensor_compile.passes.algebra import is_reduction
from dtensor_compile.passes.compose_across_operators import LONGEST
from dtensor_compile.passes.compose_redistributions import adds_no_partial
from dtensor_compile.passes.unary_chain import chain


def reduce_before_sending(graph: torch.fx.Graph) -> list[Decision]:
    """Moves reductions in `graph` in front of redistributions."""
    return [made for node in redistributions(graph) if (made := _reduce(node)) is not None]


def _reduce(node: torch.fx.Node) -> Decision | None:
    this, last = redistribution_of(node), node
    behind: list[torch.fx.Node] = []
    while not (behind and is_reduction(last)):
        if len(behind) == LONGEST or len(last.users) != 1 or runs_when(last) != runs_when(node):
            return None
        last = next(iter(last.users))
        if last.op != "call_function" or len(last.all_input_nodes) != 1:
            return None
        behind.append(last)
    moved = chain(this, behind) if runs_when(last) == runs_when(node) else None
    if moved is None:
        return None
    held, wanted = moved.held, moved.wanted
    if held == wanted or not adds_no_partial(held.spec, wanted.spec):
        return None
    direct = RedistributeNode(this.local, held.spec, wanted.spec, this.mesh, wanted.shape)
    after, before = redistribution_cost(direct, value_of(last).element_size()), cost_of([node])
    if not after.is_less(before):
        return None
    where = source_line(node)
    local = moved.apply(this.local, last)
    if not replace(last, redistribute(direct._replace(local=local), like=node, before=last)):
        return None
    return Decision(
        "reduce_before_sending", where, f"reduced first, {after} are sent and not {before}", str(this), str(direct)
    )
