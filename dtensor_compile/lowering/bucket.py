"""Small collectives of one kind, group and dtype become one.

    before   a = all_gather(x); b = wait(a); c = all_gather(y); d = wait(c)
    after    s = all_gather_coalesced([x, y]); b = wait(s[0]); d = wait(s[1])

One message carries what several did: each rank sends and receives the same elements, and each element is gathered or added as
before (with more than 2 ranks gloo's all_reduce goes around its ring from another start, so that the last bits of a sum may
differ). It pays while a collective takes longer to start than to send: up to `FULL` times what the link carries in its latency.
Nothing is copied for it in the graph: these are the coalesced forms of the backend, which sends several tensors at once (NCCL),
or packs them beside compute, in the thread that sends (gloo). What gloo would scatter is packed by one kernel instead, for an
exchange (`reduce_by_exchange.py`).

What joins a bucket:

    gathers of inputs            at the first of them; the first use waits for what the link carries in a few latencies more
    reductions nobody waits for  at the last of them, as gradients become ready
    others                       where the later one needs nothing that is computed after the first one started

All ranks find the same buckets: they follow from the order of starts, from sizes, which are padded and equal, and from the
topology. Collectives of the program's own are no part of them, and no bucket reaches across one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch

from dtensor_compile.compat.collectives import functional
from dtensor_compile.decisions import Decision
from dtensor_compile.lowering.start_order import is_light
from dtensor_compile.passes.nodes import FUSED, PART, REDISTRIBUTES, is_fixed, is_start, is_wait, source_line
from dtensor_compile.report.graphs import collective_of
from dtensor_compile.topology.links import Cluster, rounds

_COALESCED = {
    functional("all_gather_into_tensor"): functional("all_gather_into_tensor_coalesced"),
    functional("all_reduce"): functional("all_reduce_coalesced"),
    functional("reduce_scatter_tensor"): functional("reduce_scatter_tensor_coalesced"),
}

#: A bucket is full when sending takes this much longer than starting.
FULL = 8.0


@dataclass
class _Bucket:
    """Collectives that become one, in order; `late` where it starts at the last of them."""

    starts: list[torch.fx.Node] = field(default_factory=list)
    bytes: int = 0
    late: bool = False


def bucket_collectives(graph: torch.fx.Graph, cluster: Cluster) -> list[Decision]:
    """Merges small collectives of a lowered graph; returns one decision a bucket."""
    return [_merge(bucket) for bucket in _buckets(graph, cluster) if len(bucket.starts) > 1]


def _buckets(graph: torch.fx.Graph, cluster: Cluster) -> list[_Bucket]:
    position = {node: index for index, node in enumerate(graph.nodes)}
    done: list[_Bucket] = []
    filling: dict[object, _Bucket] = {}
    for node in graph.nodes:
        if is_fixed(node) or is_start(node) and REDISTRIBUTES not in node.meta:
            filling.clear()
        if not is_start(node) or REDISTRIBUTES not in node.meta or node.target not in _COALESCED or {PART, FUSED} & node.meta.keys():
            continue
        this = collective_of(node)
        full = FULL * _saturating(cluster, this.kind, this.ranks)
        if this.bytes >= full or any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape):
            continue
        late = _unused(node)
        key = (node.target, node.args[1:], this.dtype, node.meta["val"].device, late)
        bucket = filling.get(key)
        if bucket is None or bucket.bytes + this.bytes > full or not late and not _ready(node, bucket.starts[0], position):
            bucket = filling[key] = _Bucket(late=late)
            done.append(bucket)
        bucket.starts.append(node)
        bucket.bytes += this.bytes
    return done


def _saturating(cluster: Cluster, kind: str, ranks: tuple[int, ...]) -> float:
    """Bytes that the link carries while a collective starts."""
    link = cluster.link(ranks)
    return max(1, rounds(kind, len(ranks))) * link.latency * link.bandwidth


def _unused(start: torch.fx.Node) -> bool:
    """Whether nothing but copies on the way to an output needs the result."""
    if "reduce" not in start.target._schema.name:  # type: ignore[union-attr]
        return False
    stack, seen = [start], {start}
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op == "output":
                continue
            if not is_wait(user) and not is_light(user):
                return False
            seen.add(user)
            stack.append(user)
    return True


def _ready(start: torch.fx.Node, first: torch.fx.Node, position: dict[torch.fx.Node, int]) -> bool:
    """Whether `start` needs only copies that may run before `first`."""
    stack, seen = list(start.all_input_nodes), set()
    while stack:
        node = stack.pop()
        if node in seen or position[node] < position[first]:
            continue
        if not is_light(node):
            return False
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return True


def _merge(bucket: _Bucket) -> Decision:
    starts = bucket.starts
    first, place = starts[0], starts[-1] if bucket.late else starts[0]
    graph = first.graph
    if not bucket.late:
        _raise(starts[1:], first)
    inherited = {key: value for key, value in first.meta.items() if key != "val"}
    with graph.inserting_before(place):
        merged = graph.call_function(_COALESCED[first.target], ([start.args[0] for start in starts], *first.args[1:]))
        merged.meta = {**inherited, "val": [start.meta["val"] for start in starts]}
        items = [graph.call_function(operator.getitem, (merged, index)) for index in range(len(starts))]
    for start, item in zip(starts, items):
        item.meta = dict(start.meta)
        if bucket.late:
            _lower_users(start, place)
        start.replace_all_uses_with(item)
        graph.erase_node(start)
    kind, where = collective_of(merged).kind, source_line(merged)
    reason = f"{bucket.bytes:,} bytes in one message: a collective of that size still takes as long to start as to send"
    return Decision("bucket_collectives", where, reason, f"{len(starts)} {kind}", f"1 {kind}")


def _raise(starts: list[torch.fx.Node], first: torch.fx.Node) -> None:
    """What `starts` need before `first`."""
    position = {node: index for index, node in enumerate(first.graph.nodes)}
    needed: set[torch.fx.Node] = set()
    stack = [source for start in starts for source in start.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in needed and position[node] > position[first]:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    for node in sorted(needed, key=position.__getitem__):
        first.prepend(node)


def _lower_users(start: torch.fx.Node, place: torch.fx.Node) -> None:
    """The wait for `start`, and the copies behind it, after `place`."""
    order = {node: index for index, node in enumerate(start.graph.nodes)}
    found: set[torch.fx.Node] = set()
    stack = [start]
    while stack:
        for user in stack.pop().users:
            if user not in found and user.op != "output" and order[user] < order[place]:
                found.add(user)
                stack.append(user)
    for node in sorted(found, key=order.__getitem__, reverse=True):
        place.append(node)
