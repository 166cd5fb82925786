"""Fuses matmuls beside collectives into torch's operators for symmetric memory, which compute on a part while the next
one is sent.

    before   s = all_gather(x); y = mm(wait(s), w)
    after    y = fused_all_gather_matmul(x, [w])

    before   s = reduce_scatter(mm(h, w)); z = wait(s)
    after    z = fused_matmul_reduce_scatter(h, w)

In: a lowered graph in its final order, in which `decompose.py` has marked starts. Out: the same values, with those
collectives and their matmuls as one operator at the place of the first matmul. It runs after everything that reads
collectives from the graph (the report, the agreement between ranks).
"""

from __future__ import annotations

import operator

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import node_arg, value_of
from dtensor_compile.graph.node_costs import collective_of
from dtensor_compile.graph.nodes import FUSED, source_line
from dtensor_compile.schedule.decompose import Maker, Pair, erase_reduced, erase_views, pairs

aten = torch.ops.aten


def fuse_matmuls(graph: torch.fx.Graph) -> list[Decision]:
    """Replaces the collectives that `decompose_matmuls` marked for fusion."""
    decisions = []
    for pair in list(pairs(graph)):
        if FUSED in pair.start.meta and not pair.why_not:
            where, before = source_line(pair.start), f"{collective_of(pair.start).kind} and {len(pair.matmuls)} mm"
            fused = _fuse_gather(pair) if pair.gathers else _fuse_scatter(pair)
            reason = (
                "the group has symmetric memory"
                if fused
                else "no matmul's other factor is there when the gather is needed"
            )
            sent = None if fused else collective_of(pair.start).bytes
            decisions.append(
                Decision("fuse_matmuls", where, reason, before, fused or before, left_alone=not fused, bytes=sent)
            )
    return decisions


def _fuse_gather(pair: Pair) -> str:
    """The name of the operator; empty if it cannot be inserted."""
    wait, shape = pair.wait, list(value_of(pair.wait).shape)
    ready = [matmul for matmul in pair.matmuls if node_arg(matmul, 1) < wait]
    if not ready:
        return ""
    left = value_of(node_arg(ready[0], 0))
    make = Maker(wait, pair.start)
    rows = make(aten.view.default, pair.start.args[0], [pair.rows, left.shape[1]])
    weights = [matmul.args[1] for matmul in ready]
    whole = pair.whole or len(ready) < len(pair.matmuls)
    op = torch.ops.symm_mem.fused_all_gather_matmul.default
    fused = make(op, rows, weights, 0, pair.start.args[2], return_A=whole)
    results = make(operator.getitem, fused, 1)
    for index, matmul in enumerate(ready):
        matmul.replace_all_uses_with(Maker(wait, matmul)(operator.getitem, results, index))
        matmul.graph.erase_node(matmul)
    erase_views(wait)
    if wait.users:
        wait.replace_all_uses_with(make(aten.view.default, make(operator.getitem, fused, 0), shape))
    wait.graph.erase_node(wait)
    pair.start.graph.erase_node(pair.start)
    return op._schema.name.split("::")[1]


def _fuse_scatter(pair: Pair) -> str:
    start, wait = pair.start, pair.wait
    (matmul,) = pair.matmuls
    make = Maker(start, start)
    op = torch.ops.symm_mem.fused_matmul_reduce_scatter.default
    reduced = make(op, *matmul.args, start.args[1], 0, start.args[3])
    wait.replace_all_uses_with(make(aten.view.default, reduced, list(value_of(wait).shape)))
    wait.graph.erase_node(wait)
    erase_reduced(start)
    return op._schema.name.split("::")[1]
