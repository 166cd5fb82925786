"""Merges collectives that the program groups, and small ones, of one kind, process group and dtype.

    before   a = all_gather(x); b = wait(a); c = all_gather(y); d = wait(c)
    after    s = all_gather_coalesced([x, y]); b = wait(s[0]); d = wait(s[1])

Each rank sends and receives the same elements as before, and each element is gathered or added as before (with more
than 2 ranks gloo's all_reduce goes around its ring from another start, so that the last bits of a sum may differ).
Parameters that one ``fully_shard`` wraps are gathered and reduced together, and gradients of
``DistributedDataParallel`` fill its buckets (`ops/groups.py`). Beyond that, merging pays while a collective takes
longer to start than to send: up to `FULL` times the bytes that the link carries during its latency. Nothing is copied
in the graph: the backend has coalesced forms, and sends several tensors at once (NCCL), or packs them beside compute,
in the thread that sends (gloo). Reduce-scatters of gloo are packed by one kernel instead, for an exchange
(`reduce_by_exchange.py`).

Collectives that join a bucket, and its place:

    gathers of inputs            at the first of them; the first use waits for what the link carries in a few latencies
                                 more. Of what the program groups, large parts between whose first uses other groups are
                                 used stay apart
    reductions nobody waits for  at the last of them, as gradients become ready
    others                       where the later one needs nothing that is computed after the first one started

All ranks find the same buckets: they follow from the order of starts, from sizes, which are padded and equal, and from
the topology. Collectives of the program itself are not part of them, and no bucket reaches across one.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch

from dtensor_compile.compat.distributed.functional_collectives import functional
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import node_arg, operator_of, value_of
from dtensor_compile.graph.node_builder import add_call, inherited
from dtensor_compile.graph.node_costs import collective_of, result_bytes
from dtensor_compile.graph.nodes import FUSED, PART, RECORDED_AS, is_fixed, is_start, is_wait, source_line
from dtensor_compile.ops.groups import GROUP, REDISTRIBUTES, Group
from dtensor_compile.schedule.start_order import first_use, is_light, lower_users
from dtensor_compile.topology.links import Cluster, startup_seconds

#: The form of a collective that takes several tensors.
COALESCED = {
    functional("all_gather_into_tensor"): functional("all_gather_into_tensor_coalesced"),
    functional("all_reduce"): functional("all_reduce_coalesced"),
    functional("reduce_scatter_tensor"): functional("reduce_scatter_tensor_coalesced"),
}

#: A bucket is full when sending takes this many times as long as starting.
FULL = 8.0
#: A group of the program is split if a part takes this many times as long to send as to start. On links between GPUs
#: that is more than a layer of a large model has.
ENOUGH = 160.0


@dataclass
class _Bucket:
    """Collectives that are merged into one.

    Attributes:
        starts: in the order of the graph.
        late: whether it starts at the last of them, else at the first.
        stretch: number of the stretch between nodes that no bucket reaches across.
        group: the program's group; None if it has none.
        sends: bytes that this rank sends.
        bytes: of the tensors that are sent.
        full: whether nothing more is added.
    """

    starts: list[torch.fx.Node] = field(default_factory=list)
    late: bool = False
    stretch: int = 0
    group: Group | None = None
    sends: int = 0
    bytes: int = 0
    full: bool = False

    def key(self) -> Hashable:
        """The properties that collectives of one bucket have in common."""
        first = self.starts[0]
        value = value_of(node_arg(first, 0))
        return first.target, first.args[1:], value.dtype, value.device, self.late, self.stretch

    def add(self, other: _Bucket) -> None:
        self.starts += other.starts
        self.sends += other.sends
        self.bytes += other.bytes


def bucket_collectives(graph: torch.fx.Graph, cluster: Cluster, *, further: bool = True) -> list[Decision]:
    """Merges collectives of a lowered graph; returns one decision a bucket.

    Args:
        further: also merge those that the program does not group, if that pays on `cluster`.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    buckets = _grouped_by_program(_by_first_use(list(_alone(graph)), cluster, position), cluster, position)
    if further:
        buckets = _merge_small(buckets, cluster, position)
    return [_merge(bucket) for bucket in buckets if len(bucket.starts) > 1]


def _by_first_use(alone: list[_Bucket], cluster: Cluster, position: dict[torch.fx.Node, int]) -> list[_Bucket]:
    """Splits the gathers of a group into large parts, at points where other groups are first used in between.

    The root of a model wraps its first and its last layer: gathered together, the last one would be in memory all the
    time, and the first, for which everything waits, would arrive as late as both.
    """
    grouped = [
        (this, this.group, first_use(this.starts[0], position))
        for this in alone
        if this.group is not None and not this.late
    ]
    firsts: dict[Group, int] = {}
    for _, group, use in grouped:
        firsts[group] = min(use, firsts.get(group, use))
    parts: dict[Group, dict[int, list[_Bucket]]] = {}
    for this, group, use in grouped:
        between = sum(place < use for other, place in firsts.items() if other != group)
        parts.setdefault(group, {}).setdefault(between, []).append(this)
    for group, by_place in parts.items():
        if len(by_place) < 2:
            continue
        number, rest = 0, [by_place[place] for place in sorted(by_place)]
        for index, part in enumerate(rest[:-1]):
            if _is_large(part, cluster) and _is_large([this for later in rest[index + 1 :] for this in later], cluster):
                number += 1
            for this in rest[index + 1]:
                this.group = group._replace(name=f"{group.name}, part {number}") if number else group
    return alone


def _is_large(part: list[_Bucket], cluster: Cluster) -> bool:
    """Whether merged collectives take much longer to send than to start."""
    about = collective_of(part[0].starts[0])
    return sum(this.sends for this in part) >= FULL * _saturating(cluster, about.kind, about.ranks)


def _alone(graph: torch.fx.Graph) -> Iterator[_Bucket]:
    """Each collective that may be in a bucket, as a bucket of its own."""
    stretch = 0
    for node in graph.nodes:
        if is_fixed(node) or is_start(node) and REDISTRIBUTES not in node.meta:
            stretch += 1
        if (
            not is_start(node)
            or REDISTRIBUTES not in node.meta
            or node.target not in COALESCED
            or {PART, FUSED} & node.meta.keys()
        ):
            continue
        if any(isinstance(size, torch.SymInt) for size in value_of(node).shape):
            continue
        yield _Bucket(
            [node], _unused(node), stretch, node.meta.get(GROUP), collective_of(node).bytes, result_bytes(node.args[0])
        )


def _grouped_by_program(alone: list[_Bucket], cluster: Cluster, position: dict[torch.fx.Node, int]) -> list[_Bucket]:
    """One bucket for each group of the program, kind, process group and dtype, up to the size limit.

    It is full at the program's own limit, and when it takes `ENOUGH` times as long to send as to start: a bucket can
    overlap neither with the compute before its last input nor with the compute that needs its first output.
    """
    done: list[_Bucket] = []
    filling: dict[Hashable, tuple[_Bucket, int]] = {}
    for this in alone:
        key = this.group and (this.group, this.key())
        bucket, number = filling.get(key, (None, -1))
        if (
            bucket is None
            or this.group is None
            or bucket.full
            or not this.late
            and not _ready(this.starts[0], bucket.starts[0], position)
        ):
            done.append(this)
            bucket, number = filling[key] = this, number + 1
        else:
            bucket.add(this)
        if this.group is not None:
            about = collective_of(this.starts[0])
            bucket.full = bucket.bytes >= this.group.limit(number) or bucket.sends >= ENOUGH * _saturating(
                cluster, about.kind, about.ranks
            )
    return done


def _merge_small(buckets: list[_Bucket], cluster: Cluster, position: dict[torch.fx.Node, int]) -> list[_Bucket]:
    """Merges buckets that take longer to start than to send."""
    done: list[_Bucket] = []
    filling: dict[Hashable, _Bucket] = {}
    for this in sorted(buckets, key=lambda bucket: position[bucket.starts[-1 if bucket.late else 0]]):
        about = collective_of(this.starts[0])
        full = FULL * _saturating(cluster, about.kind, about.ranks)
        into = filling.get(this.key())
        if this.sends >= full:
            done.append(this)
        elif (
            into is None
            or into.sends + this.sends > full
            or not this.late
            and not all(_ready(start, into.starts[0], position) for start in this.starts)
        ):
            done.append(this)
            filling[this.key()] = this
        else:
            into.add(this)
            into.group = into.group if into.group == this.group else None
    return done


def _saturating(cluster: Cluster, kind: str, ranks: tuple[int, ...]) -> float:
    """Bytes that the link could carry while a collective starts."""
    return startup_seconds(cluster, kind, ranks) * cluster.link(ranks).rate(kind, len(ranks))


def _unused(start: torch.fx.Node) -> bool:
    """Whether nothing but copies on the way to an output needs the result."""
    if "reduce" not in operator_of(start)._schema.name:
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
    starts = sorted(bucket.starts)
    first, place = starts[0], starts[-1] if bucket.late else starts[0]
    graph = first.graph
    if not bucket.late:
        _raise(starts[1:], first)
    with graph.inserting_before(place):
        merged = add_call(
            graph,
            COALESCED[operator_of(first)],
            ([start.args[0] for start in starts], *first.args[1:]),
            meta=inherited(first),
            value=[start.meta["val"] for start in starts],
        )
        if carried := [carried for start in starts for carried in collective_of(start).carries]:
            merged.meta[RECORDED_AS] = tuple(carried)
        items = [graph.call_function(operator.getitem, (merged, index)) for index in range(len(starts))]
    for start, item in zip(starts, items):
        item.meta = dict(start.meta)
        if bucket.late:
            lower_users(start, place)
        start.replace_all_uses_with(item)
        graph.erase_node(start)
    kind, where = collective_of(merged).kind, source_line(merged)
    why = (
        "as the program groups them"
        if bucket.group
        else "a collective of that size still takes as long to start as to send"
    )
    reason = f"{bucket.sends:,} bytes in one message: {why}"
    return Decision("bucket_collectives", where, reason, f"{len(starts)} {kind}", f"1 {kind}")


def _raise(starts: list[torch.fx.Node], first: torch.fx.Node) -> None:
    """Moves the operands of `starts` in front of `first`."""
    needed: set[torch.fx.Node] = set()
    stack = [source for start in starts for source in start.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in needed and node > first:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    for node in sorted(needed):
        first.prepend(node)
