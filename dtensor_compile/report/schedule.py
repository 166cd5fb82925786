"""Simulated schedule of a lowered graph: start of each operator and collective, and exposed parts of collectives.

Input: the operations of a graph in order, and a cluster. Output: spans on two streams, and per collective its seconds
and its exposed seconds. The rules are those of a device with one stream for compute and one for communication:

    an operator starts when the one before it ends, unless a wait delays it, or the host has not issued it yet
    a collective starts when its operands are ready and the one before it on its stream is done; with some backends
    that takes host time first, in which nothing is computed (`dtensor_compile.topology.backends.HOST_SECONDS`), and
    latency is over when the one before it is done (`SEVERAL_UNDER_WAY` there)
    a wait delays compute until its collective is done; that delay is the exposed time of the collective
    compute beside a collective takes longer, by the contention of the device (`Device.contention`)
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtensor_compile.graph.node_costs import Operation, SentCollective
from dtensor_compile.topology.backends import host_seconds
from dtensor_compile.topology.links import Cluster, compute_seconds, seconds_in_turn


@dataclass(frozen=True)
class Timed:
    """One operator or collective: index into the operations (into the collectives), start and duration in seconds."""

    index: int
    start: float
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """Schedule of a graph, in seconds from its start.

    Attributes:
        compute, communication: the two streams, in order.
        exposed: per collective, seconds in which compute waits for it.
        seconds: end of the last operation.
    """

    compute: tuple[Timed, ...]
    communication: tuple[Timed, ...]
    exposed: tuple[float, ...]
    seconds: float


def schedule(
    operations: Sequence[Operation],
    collectives: Sequence[SentCollective],
    cluster: Cluster,
    stream: Callable[[SentCollective], str] = lambda collective: "",
    issue: Sequence[float] = (),
) -> Schedule:
    """The schedule of one run of a graph on `cluster`.

    Args:
        stream: name of the stream on which a collective runs; by default one for all.
        issue: for each operation, seconds of the host to issue it; by default none.
    """
    now = issued = 0.0
    free: dict[str, float] = {}
    compute: list[Timed] = []
    communication: list[Timed] = []
    ends: dict[int, float] = {}
    exposed = [0.0] * len(collectives)
    in_flight = _InFlight(cluster.device.contention)
    for index, operation in enumerate(operations):
        if issue:
            issued += issue[index]
            now = max(now, issued)
        if operation.starts is not None:
            this = collectives[operation.starts]
            now += host_seconds(cluster.backend)
            start = max(now, free.get(stream(this), 0.0))
            link = cluster.link(this.ranks)
            alone, behind = seconds_in_turn(link, cluster.backend, this.kind, this.bytes, len(this.ranks))
            end = max(now + alone, start + behind)
            communication.append(Timed(operation.starts, start, end - start))
            free[stream(this)] = ends[operation.starts] = end
            in_flight.add(start, end)
        elif operation.waits_for is not None:
            waited = max(0.0, ends[operation.waits_for] - now)
            exposed[operation.waits_for] += waited
            now += waited
        else:
            seconds = compute_seconds(
                cluster.device,
                operation.flops,
                operation.bytes,
                operation.itemsize,
                operation.fused,
                operation.kind,
            )
            seconds = in_flight.beside(seconds, now)
            compute.append(Timed(index, now, seconds))
            now += seconds
    return Schedule(tuple(compute), tuple(communication), tuple(exposed), max(now, *free.values(), 0.0))


class _InFlight:
    """Times in which collectives run, as far as they are not over."""

    def __init__(self, contention: float) -> None:
        self.speed = 1.0 - contention
        self._ahead: list[tuple[float, float]] = []

    def add(self, start: float, end: float) -> None:
        """A collective runs from `start` to `end`."""
        bisect.insort(self._ahead, (start, end))

    def beside(self, seconds: float, now: float) -> float:
        """Seconds of compute that begins `now` and takes `seconds` where no collective runs."""
        if self.speed == 1.0:
            return seconds
        self._ahead = [(start, end) for start, end in self._ahead if end > now]
        at, left = now, seconds
        for start, end in self._ahead:
            alone = max(0.0, start - at)
            if alone >= left:
                break
            at, left = at + alone, left - alone
            if left <= (end - at) * self.speed:
                return at + left / self.speed - now
            if end > at:
                at, left = end, left - (end - at) * self.speed
        return at + left - now
