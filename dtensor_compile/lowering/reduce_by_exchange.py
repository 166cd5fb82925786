"""On gloo a sum is scattered by exchanging its parts and adding them where they belong.

    before   s = reduce_scatter_tensor(x, "sum", 2, group); y = wait(s)
    after    s = all_to_all_single(x, [k, k], [k, k], group); w = wait(s); y = w[:k] + w[k:]

Rank r keeps part r of the sum over all ranks. Gloo has no reduce-scatter: torch lets it reduce the whole on every rank and keeps
a part, which sends the input twice over (`topology/backends.py`). Exchanging the parts sends what has to be sent, (n-1)/n of the
input, and the additions become part of the kernel that reads them.

The same numbers: with 2 ranks there is one addition, whose order does not matter. With more, parts are added in the order of
ranks, with a rounding after each as gloo does it; gloo goes around a ring that starts elsewhere for each part, so that the last
bits may differ. A mean is the sum divided by n, as torch computes it for gloo. Only these two, of numbers that gloo exchanges, and
only what all ranks run alike (`REDISTRIBUTES`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.collectives import functional, wait_tensor
from dtensor_compile.compat.inductor import trace_local
from dtensor_compile.compat.mesh import group_named
from dtensor_compile.decisions import Decision
from dtensor_compile.passes.nodes import REDISTRIBUTES, is_wait, source_line

_reduce_scatter = functional("reduce_scatter_tensor")
_all_to_all = functional("all_to_all_single")

#: More ranks than this have each part added pairwise by one kernel of torch's.
UNROLLED = 8


def reduce_by_exchange(graph: torch.fx.Graph) -> list[Decision]:
    """Replaces every sum that gloo would scatter."""
    decisions = []
    for node in graph.find_nodes(op="call_function", target=_reduce_scatter):
        x, op, n, group = node.args
        value = x.meta["val"]
        if op not in ("sum", "avg") or REDISTRIBUTES not in node.meta or not _on_gloo(group, value):
            continue
        if op == "avg" and not value.is_floating_point():
            continue  # gloo refuses to average integers
        waits = [user for user in node.users if is_wait(user)]
        if len(waits) != 1 or len(node.users) != 1:
            continue
        _replace(node, waits[0])
        reason = f"gloo would reduce all of it on each of the {n} ranks, which sends twice as much"
        decisions.append(Decision("reduce_by_exchange", source_line(node), reason, "reduce_scatter", "all_to_all + sum"))
    return decisions


def _on_gloo(group: str, x: torch.Tensor) -> bool:
    found = group_named(group)
    on_cpu = x.device.type == "cpu" and not x.is_complex() and x.dtype != torch.bool
    return on_cpu and found is not None and dist.get_backend(found) == "gloo"


def _replace(start: torch.fx.Node, wait: torch.fx.Node) -> None:
    graph, (x, op, n, group) = start.graph, start.args
    rows: Any = x.meta["val"].shape[0] // n
    inherited = {key: value for key, value in start.meta.items() if key != "val"}

    def add(parts: torch.Tensor, rows: Any) -> torch.Tensor:
        parts = parts.unflatten(0, (n, rows))
        if n > UNROLLED:
            total = parts.sum(0, dtype=parts.dtype)
        else:
            total = parts[0]
            for rank in range(1, n):
                total = total + parts[rank]
        return total / n if op == "avg" else total

    with graph.inserting_before(start):
        part = rows
        if isinstance(rows, torch.SymInt):
            size = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
            part = graph.call_function(operator.floordiv, (size, n))
            size.meta, part.meta = {**inherited, "val": x.meta["val"].shape[0]}, {**inherited, "val": rows}
        exchange = graph.call_function(_all_to_all, (x, [part] * n, [part] * n, group))
        exchange.meta = {**inherited, "val": x.meta["val"].new_empty(x.meta["val"].shape)}
    with graph.inserting_before(wait):
        done = graph.call_function(wait_tensor, (exchange,))
        done.meta = {**inherited, "val": exchange.meta["val"].new_empty(x.meta["val"].shape)}
        traced = trace_local(add, [done.meta["val"], rows]).graph
        values = dict(zip(traced.find_nodes(op="placeholder"), (done, part)))
        for inner in traced.nodes:
            if inner.op == "placeholder":
                continue
            if inner.op == "output":
                wait.replace_all_uses_with(values[inner.args[0]])
            else:
                values[inner] = graph.node_copy(inner, values.__getitem__)
                values[inner].meta.update(inherited)
    graph.erase_node(wait)
    graph.erase_node(start)
