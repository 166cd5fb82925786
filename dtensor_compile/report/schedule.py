"""When each operator and each collective of a lowered graph runs, and which part of a collective nothing hides.

In: the operations of a graph in order, and a cluster. Out: spans on two streams, and per collective its seconds and its
exposed seconds. The rules are those of a device with one stream for compute and one for communication:

    an operator starts when the one before it ends, or where a wait holds it up
    a collective starts when its operands are there, and the one before it is done; with some backends that takes time
    of the host first, in which nothing is computed (`dtensor_compile.topology.backends.HOST_SECONDS`)
    a wait holds up compute until its collective is done; how long it does is the exposed time of that collective
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtensor_compile.graph.node_costs import Operation, SentCollective
from dtensor_compile.topology.backends import host_seconds
from dtensor_compile.topology.links import Cluster, collective_seconds, compute_seconds


@dataclass(frozen=True)
class Timed:
    """One operator or collective: index into the operations (into the collectives), start and duration in seconds."""

    index: int
    start: float
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """What runs when, in seconds from the start of the graph.

    Attributes:
        compute, communication: the two streams, in order.
        exposed: per collective, seconds in which compute waits for it.
        seconds: until all is done.
    """

    compute: tuple[Timed, ...]
    communication: tuple[Timed, ...]
    exposed: tuple[float, ...]
    seconds: float


def schedule(operations: Sequence[Operation], collectives: Sequence[SentCollective], cluster: Cluster) -> Schedule:
    """The schedule of one run of a graph on `cluster`."""
    now = free = 0.0
    compute: list[Timed] = []
    communication: list[Timed] = []
    ends: dict[int, float] = {}
    exposed = [0.0] * len(collectives)
    for index, operation in enumerate(operations):
        if operation.starts is not None:
            this = collectives[operation.starts]
            now += host_seconds(cluster.backend)
            start, seconds = max(now, free), collective_seconds(cluster, this.kind, this.bytes, this.ranks)
            communication.append(Timed(operation.starts, start, seconds))
            free = ends[operation.starts] = start + seconds
        elif operation.waits_for is not None:
            waited = max(0.0, ends[operation.waits_for] - now)
            exposed[operation.waits_for] += waited
            now += waited
        else:
            seconds = compute_seconds(
                cluster.device, operation.flops, operation.bytes, operation.itemsize, operation.fused
            )
            compute.append(Timed(index, now, seconds))
            now += seconds
    return Schedule(tuple(compute), tuple(communication), tuple(exposed), max(now, free))
