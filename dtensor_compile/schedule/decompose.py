"""Decomposes a matmul beside a collective: one part is sent while another is computed.

    before   s = all_gather(x); y = mm(wait(s), w)
    after    s0 = all_gather(x0); s1 = all_gather(x1); y = interleaved(mm(wait(s0), w), mm(wait(s1), w))

    before   s = reduce_scatter(mm(h, w)); z = wait(s)
    after    s0 = reduce_scatter(mm(h0, w)); s1 = reduce_scatter(mm(h1, w)); z = joined(wait(s0), wait(s1))

In: a lowered graph and a cluster. Out: the same values, and a decision for each collective that feeds or is fed by
matmuls. Part i has the i-th rows of the shard of every rank, so that all ranks run the same program: x0 = x[:R/k], and
h0 has the rows of h that become those. If something reads a result whole, the parts are joined, which is a copy unless
it is fused into another kernel.

The number of parts is chosen by cost. With T_k the seconds of a part on its link and P_k those of the matmuls of a
part, a collective of which e of T seconds are exposed (by the simulation of `schedule_graph.py`) exposes in k parts

    max(0, T_k + (k - 1) max(0, T_k - P_k) - (T - e))

and pays if that, with the copies and launches it takes, is less than e. Latency is part of T_k. Matmuls of fewer rows
are rounded as a matmul of that size is. All ranks make the same choice, since this runs only if all shards are even.

If the program has enabled symmetric memory for the group, torch has one operator for both, which divides by ranks and
copies nothing. The same estimate with k = n decides, and `fuse_matmuls.py` inserts the operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtensor_compile.compat.distributed.functional_collectives import functional, wait_tensor
from dtensor_compile.compat.distributed.symmetric_memory import has_symmetric_memory
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import const_arg, node_arg, value_of
from dtensor_compile.graph.node_builder import add_call, inherited
from dtensor_compile.graph.node_costs import collective_of, result_bytes
from dtensor_compile.graph.nodes import FUSED, PART, is_start, is_wait, source_line
from dtensor_compile.graph.operator_traits import ORDERED_VIEWS
from dtensor_compile.lowering.reduce_by_exchange import is_exchanged
from dtensor_compile.ops.groups import REDISTRIBUTES
from dtensor_compile.schedule.list_scheduler import arrange, excess
from dtensor_compile.schedule.schedule_graph import cost_of, graph_tasks
from dtensor_compile.schedule.simulated_device import simulate
from dtensor_compile.topology.backends import host_seconds
from dtensor_compile.topology.links import Cluster, compute_seconds

aten = torch.ops.aten

_GATHER, _SCATTER = functional("all_gather_into_tensor"), functional("reduce_scatter_tensor")

#: Numbers of parts that are tried.
PARTS = (2, 3, 4, 6, 8)


@dataclass
class Pair:
    """A collective and the matmuls beside it.

    Attributes:
        start, wait: nodes of the collective.
        matmuls: the matmuls that read the gathered tensor, or the one whose result is reduced.
        rows: number of rows of one rank's shard.
        whole: whether something else reads the gathered tensor.
        why_not: why the matmuls cannot be computed in parts; empty if they can.
    """

    start: torch.fx.Node
    wait: torch.fx.Node
    matmuls: tuple[torch.fx.Node, ...]
    rows: int = 0
    whole: bool = False
    why_not: str = ""

    @property
    def gathers(self) -> bool:
        return self.start.target is _GATHER

    @property
    def fuses(self) -> bool:
        """Whether torch has one operator for it (`fuse_matmuls.py`), which divides it by ranks."""
        return has_symmetric_memory(const_arg(self.start, 2 if self.gathers else 3, str))

    @property
    def ranks(self) -> int:
        return const_arg(self.start, 1 if self.gathers else 2, int)


def decompose_matmuls(graph: torch.fx.Graph, cluster: Cluster, overlap_memory: float) -> list[Decision]:
    """Decomposes the matmuls of `graph` that are beside collectives, if that pays.

    Args:
        overlap_memory: as for `schedule_graph`, whose order determines the exposed time.
    """
    found = list(pairs(graph))
    if not found:
        return []
    tasks = graph_tasks(graph, cluster)
    peak = simulate(tasks, range(len(tasks))).peak
    exposed = simulate(tasks, arrange(tasks, excess(overlap_memory, peak))).exposed
    number = {node: index for index, node in enumerate(graph.nodes)}
    decisions = []
    divided: set[torch.fx.Node] = set()
    for pair in found:
        parts, reason = 1, pair.why_not
        if not reason and not divided.isdisjoint(pair.matmuls):
            reason = "the matmul is in parts already, for another collective"
        if not reason:
            matmuls = sum(tasks[number[matmul]].seconds for matmul in pair.matmuls)
            start = number[pair.start]
            parts, reason = _choose(pair, cluster, tasks[start].seconds - exposed[start], matmuls)
            if parts > 1 and pair.fuses:
                pair.start.meta[FUSED] = True
        what = f"{collective_of(pair.start).kind} and {len(pair.matmuls)} mm"
        after = "one operator" if FUSED in pair.start.meta else f"{parts} parts" if parts > 1 else what
        decisions.append(Decision("decompose_matmuls", source_line(pair.start), reason, what, after))
        if parts > 1:
            divided.update(pair.matmuls)
        if parts > 1 and FUSED not in pair.start.meta:
            _divide_gather(pair, parts) if pair.gathers else _divide_scatter(pair, parts)
    return decisions


# ---- what can be divided -------------------------------------------------------------------------------------------


def pairs(graph: torch.fx.Graph) -> Iterator[Pair]:
    for start in graph.nodes:
        if not is_start(start) or REDISTRIBUTES not in start.meta or start.target not in (_GATHER, _SCATTER):
            continue
        waits = [user for user in start.users if is_wait(user)]
        if len(waits) != 1 or len(start.users) != 1:
            continue
        pair = _around_gather(start, waits[0]) if start.target is _GATHER else _around_scatter(start, waits[0])
        if pair is not None:
            yield pair


def _around_gather(start: torch.fx.Node, wait: torch.fx.Node) -> Pair | None:
    matmuls: list[torch.fx.Node] = []
    whole, stack = False, [wait]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.target in ORDERED_VIEWS:
                stack.append(user)
            elif user.target is aten.mm.default and user.args[0] is node and user.args[1] is not node:
                matmuls.append(user)
            else:
                whole = True
    if not matmuls:
        return None
    pair = Pair(start, wait, tuple(matmuls), whole=whole)
    x, n = value_of(node_arg(start, 0)), pair.ranks
    lefts = [tuple(value_of(node_arg(matmul, 0)).shape) for matmul in matmuls]
    if not _fixed(x.shape, *lefts):
        pair.why_not = "sizes vary"
    elif (
        len(set(lefts)) > 1 or x.numel() * n != math.prod(shape := lefts.pop()) or shape[0] % n or not x.is_contiguous()
    ):
        pair.why_not = "its rows are no rows of the result"
    else:
        pair.rows = shape[0] // n
    return pair


def _around_scatter(start: torch.fx.Node, wait: torch.fx.Node) -> Pair | None:
    matmul = node_arg(start, 0)
    alone = True
    while matmul.target in ORDERED_VIEWS:
        alone &= len(matmul.users) == 1
        matmul = node_arg(matmul, 0)
    if matmul.target is not aten.mm.default:
        return None
    pair = Pair(start, wait, (matmul,))
    value = matmul.meta["val"]
    if not alone or len(matmul.users) > 1:
        pair.why_not = "another operator reads the result of the matmul too"
    elif not _fixed(value.shape):
        pair.why_not = "sizes vary"
    elif value.shape[0] % pair.ranks:
        pair.why_not = "its rows are no rows of the result"
    else:
        pair.rows = value.shape[0] // pair.ranks
    return pair


def _fixed(*shapes: tuple[object, ...]) -> bool:
    return all(isinstance(size, int) for shape in shapes for size in shape)


# ---- what pays -----------------------------------------------------------------------------------------------------


def _choose(pair: Pair, cluster: Cluster, hidden: float, matmuls: float) -> tuple[int, str]:
    """Number of parts (1: not decomposed), and the reason.

    Args:
        hidden: seconds of the collective, undivided, for which compute does not wait.
        matmuls: seconds of its matmuls.
    """
    this = collective_of(pair.start)
    if not pair.gathers and is_exchanged(pair.start, [node_arg(pair.start, 0)]):
        this = replace(this, kind="all_to_all")  # which it becomes, and sends half
    whole = cost_of(cluster, this).seconds
    exposed = whole - hidden
    if exposed <= 0:
        return 1, "nothing of it is exposed"
    found = []
    for k in (pair.ranks,) if pair.fuses else PARTS:
        if pair.rows % k and not pair.fuses:
            continue
        part = cost_of(cluster, replace(this, bytes=this.bytes // k)).seconds
        left = max(0.0, part + (k - 1) * max(0.0, part - matmuls / k) - hidden)
        found.append((left + _extra(pair, cluster, k), left, k))
    if not found:
        return 1, f"{pair.rows:,} rows of a shard divide by none of {', '.join(map(str, PARTS))}"
    total, left, k = min(found)
    if total >= exposed:
        return (
            1,
            f"{exposed * 1e3:.2f} ms are exposed, and {total * 1e3:.2f} ms would be in {k} parts, with the copies that "
            "takes",
        )
    copies = (total - left) * 1e3
    return (
        k,
        f"{exposed * 1e3:.2f} of {whole * 1e3:.2f} ms exposed become {left * 1e3:.2f}, copies and launches take "
        f"{copies:.2f}",
    )


def _extra(pair: Pair, cluster: Cluster, k: int) -> float:
    """Seconds that `k` parts take for copies, launches, and the additional collectives."""
    itemsize = value_of(pair.start).element_size()
    launching = (k - 1) * (len(pair.matmuls) * cluster.device.launch + host_seconds(cluster.backend))
    if pair.fuses:
        return launching  # parts are read and written in place
    if pair.gathers:
        copies = [result_bytes(matmul) for matmul in pair.matmuls] + ([result_bytes(pair.start)] if pair.whole else [])
    else:
        copies = [result_bytes(node_arg(pair.matmuls[0], 0)), result_bytes(pair.start)]
    copying = sum(compute_seconds(cluster.device, 0, 2 * size, itemsize) for size in copies)
    return copying + launching


# ---- divided -------------------------------------------------------------------------------------------------------


def _divide_gather(pair: Pair, k: int) -> None:
    n, rows, start, wait = pair.ranks, pair.rows, pair.start, pair.wait
    shape = list(value_of(wait).shape)
    columns = math.prod(shape) // (n * rows)
    make = Maker(start, start)
    flat = make(aten.view.default, start.args[0], [rows, columns])
    pieces = [make(aten.slice.Tensor, flat, 0, i * rows // k, (i + 1) * rows // k) for i in range(k)]
    starts = [make(_GATHER, piece, *start.args[1:], start=True) for piece in pieces]
    make = Maker(wait, wait)
    waits = [make(wait_tensor, part) for part in starts]
    for matmul in pair.matmuls:
        make = Maker(matmul, matmul)
        results = [make(aten.mm.default, part, matmul.args[1]) for part in waits]
        matmul.replace_all_uses_with(_interleaved(make, results, n, rows, list(value_of(matmul).shape)))
        matmul.graph.erase_node(matmul)
    erase_views(wait)
    if wait.users:
        wait.replace_all_uses_with(_interleaved(Maker(wait, wait), waits, n, rows, shape))
    wait.graph.erase_node(wait)
    start.graph.erase_node(start)


def _divide_scatter(pair: Pair, k: int) -> None:
    n, rows, start, wait = pair.ranks, pair.rows, pair.start, pair.wait
    (matmul,) = pair.matmuls
    left, right = node_arg(matmul, 0), node_arg(matmul, 1)
    make = Maker(start, matmul)
    inner = value_of(left).shape[1]
    by_part = make(aten.reshape.default, left, [n, k, rows // k, inner])
    results = []
    for i in range(k):
        piece = make(aten.clone.default, make(aten.select.int, by_part, 1, i), memory_format=torch.contiguous_format)
        results.append(make(aten.mm.default, make(aten.view.default, piece, [n * rows // k, inner]), right))
    make = Maker(start, start)
    starts = [make(_SCATTER, part, *start.args[1:], start=True) for part in results]
    make = Maker(wait, wait)
    joined = make(aten.cat.default, [make(wait_tensor, part) for part in starts])
    wait.replace_all_uses_with(make(aten.view.default, joined, list(value_of(wait).shape)))
    wait.graph.erase_node(wait)
    erase_reduced(start)


def erase_reduced(start: torch.fx.Node) -> None:
    """Erases the start of a reduction without a wait, and the matmul that it reduced."""
    unused = node_arg(start, 0)
    start.graph.erase_node(start)
    while unused.target in ORDERED_VIEWS:
        node, unused = unused, node_arg(unused, 0)
        node.graph.erase_node(node)
    unused.graph.erase_node(unused)


def _interleaved(make: Maker, parts: list[torch.fx.Node], n: int, rows: int, shape: list[int]) -> torch.fx.Node:
    """The rows of all ranks' shards in order, from parts that each have some rows of every rank."""
    k = len(parts)
    columns = math.prod(shape) // (n * rows)
    by_rank = [make(aten.view.default, part, [n, rows // k, columns]) for part in parts]
    return make(aten.view.default, make(aten.cat.default, by_rank, 1), shape)


def erase_views(node: torch.fx.Node) -> None:
    """Erases unused views of `node`."""
    for user in list(node.users):
        if user.target in ORDERED_VIEWS:
            erase_views(user)
            if not user.users:
                user.graph.erase_node(user)


class Maker:
    """Makes nodes in front of `before` with the origin of `like`."""

    def __init__(self, before: torch.fx.Node, like: torch.fx.Node) -> None:
        self.before, self.like = before, like

    def __call__(self, target: Any, *args: Any, start: bool = False, **kwargs: Any) -> torch.fx.Node:
        meta = inherited(self.like) | ({PART: True} if start else {})
        with self.before.graph.inserting_before(self.before):
            return add_call(self.before.graph, target, args, kwargs, meta=meta)
