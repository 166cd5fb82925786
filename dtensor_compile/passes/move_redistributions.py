"""Moves redistributions behind the operators that read them, to where they are cheapest.

    f(redistribute(x, A -> B), y)  =  redistribute(f(x, y'), A' -> B')

Correct by the algebra of ``algebra.py``, for one redistribution and all operators behind it that can run on A, or
several whose results are combined: partial sums are added, multiplied with replicated tensors, or with a matrix, and
reduced once at the end. Gathered tensors are sliced, looked up, normalized or reduced along their other dims before
they are sent. The new place is found over the whole graph (``minimum_cut.py``).

Results on shards are bitwise the same, or, if a kernel works on another number of rows, equal up to the difference
between kernels; sums over ranks add the same terms in another order.

It pays if the tensor read in the end is smaller, or one collective replaces several. No move sends more bytes or more
collectives.

    before   w = redistribute(x, S(1) -> R); s = slice(w, 0, 0, 4); y = mul(s, s)
    after    s = slice(x, 0, 0, 4); m = mul(s, s); y = redistribute(m, S(1) -> R)
"""

from __future__ import annotations

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.nodes import (
    Cost,
    cost_of,
    is_redistribution,
    redistribution_of,
    redistributions,
    source_line,
)
from dtensor_compile.passes.compose_redistributions import adds_no_partial
from dtensor_compile.passes.global_tensor import Global
from dtensor_compile.passes.minimum_cut import cheapest_cut
from dtensor_compile.passes.region import Region, grow_region

#: Weights of collectives and bytes: first bytes before collectives, then the other way round.
_WEIGHTS = (lambda c: (c.bytes << 20) + c.collectives, lambda c: (c.collectives << 50) + c.bytes)


def move_redistributions(graph: torch.fx.Graph) -> list[Decision]:
    """Moves redistributions in `graph` to where they send the fewest bytes."""
    seeds: dict[str, dict[torch.fx.Node, Global]] = {}
    for node in redistributions(graph):
        this = redistribution_of(node)
        held = Global.of(this.source, this.shape) if adds_no_partial(this.source, this.target) else None
        if held is not None and Global.of(this.target, this.shape) is not None:
            seeds.setdefault(this.mesh, {})[node] = held
    decisions, before = [], cost_of(redistributions(graph))
    for mesh, held_in in seeds.items():
        region = grow_region(graph, mesh, held_in)
        if region is not None:
            for part in list(region.parts()):
                decisions += _move(region, part)
    after = cost_of(redistributions(graph))
    assert not decisions or after.is_less(before), f"{after} would be sent and not {before}"
    return decisions


def _move(region: Region, part: list[torch.fx.Node]) -> list[Decision]:
    before = region.cost(part, frozenset())
    if before is None or not _may_pay(region, part, before):
        return []
    best: tuple[Cost, frozenset[torch.fx.Node]] | None = None
    for weight in _WEIGHTS:
        held = cheapest_cut(region, part, weight)
        after = region.cost(part, held)
        if after is not None and after.is_less(before) and (best is None or after.is_less(best[0])):
            best = after, held
    if best is None:
        return []
    after, held = best
    moved = [node for node in part if node in held and is_redistribution(node)]
    reason = f"{len(held) - len(moved)} operators run before: {after} are sent and not {before}"
    decisions = [
        Decision("move_redistributions", source_line(node), reason, str(redistribution_of(node)), "behind its readers")
        for node in moved
    ]
    region.rewrite(held)
    return decisions


def _may_pay(region: Region, part: list[torch.fx.Node], before: Cost) -> bool:
    """Whether a part could send less at all: something in it is smaller than what is sent, or redistributed again."""
    if all(is_redistribution(node) for node in part):
        return False
    if any(region.readers(node)[1] for node in part):
        return True
    back = [c for node in part if not is_redistribution(node) and (c := region.back(node)) is not None]
    return any(c.bytes < before.bytes or c.collectives < before.collectives for c in back)
