"""How long a collective and an operator take, from a few numbers of the machine.

Collectives, with n ranks, B bytes that one rank sends, a link of bandwidth W (bytes/s) and start-up time a (s per message):

    seconds = rounds(kind, n) a + B / W

    all_gather, reduce_scatter       log2 n rounds      recursive doubling, halving
    all_reduce                     2 log2 n             reduce_scatter, then all_gather
    all_to_all                       n - 1              pairwise exchange
    broadcast and the rest           log2 n             a tree

(R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005; the model is R.
Hockney's, 1994. B is counted as in `dtensor_compile.lowering.plan`.) The link is the slowest that the ranks of the group share:
within a host, or between hosts.

Operators, with F floating-point operations and M bytes read and written (S. Williams, A. Waterman, D. Patterson: Roofline, 2009):

    seconds = max(F / peak, M / memory bandwidth) + launch

These are estimates: they compare one program with another on one machine. They know nothing of contention, of what a compiler
fuses, or of kernels that stay below the peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A way between two ranks.

    Attributes:
        latency: seconds to start a message.
        bandwidth: bytes per second that one rank sends.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Device:
    """What one rank computes on.

    Attributes:
        peak: floating-point operations per second of a matrix product, by bytes of an element (4: float32, 2: bfloat16).
        memory: bytes per second to and from its memory.
        launch: seconds that every operator takes at least.
    """

    peak: tuple[tuple[int, float], ...]
    memory: float
    launch: float

    def operations_per_second(self, itemsize: int) -> float:
        """Peak for elements of that many bytes; the nearest larger ones where it has none of its own."""
        sizes = dict(self.peak)
        return sizes.get(itemsize) or next((rate for size, rate in sorted(self.peak) if size >= itemsize), self.peak[-1][1])


@dataclass(frozen=True)
class Cluster:
    """Hosts of `ranks_per_host` ranks each, in order of rank."""

    name: str
    ranks_per_host: int
    inside: Link
    between: Link
    device: Device

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest link that a group of global ranks uses."""
        return self.inside if len({rank // self.ranks_per_host for rank in ranks}) <= 1 else self.between


#: Makers' figures (NVLink and network per direction and device; dense matrix products), and a laptop-like pair of hosts.
CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        Cluster(
            "h100",
            8,
            Link(3e-6, 450e9),
            Link(8e-6, 50e9),
            Device(((2, 989e12), (4, 494e12), (8, 67e12)), 3.35e12, 4e-6),
        ),
        Cluster(
            "a100",
            8,
            Link(3e-6, 300e9),
            Link(8e-6, 25e9),
            Device(((2, 312e12), (4, 156e12), (8, 19.5e12)), 2.0e12, 5e-6),
        ),
        Cluster("cpu-1gbit", 1, Link(1e-4, 125e6), Link(1e-4, 125e6), Device(((4, 5e10), (8, 2.5e10)), 1e10, 2e-6)),
    )
}


def rounds(kind: str, n: int) -> int:
    """Messages that follow each other in a collective of that kind over `n` ranks."""
    if n <= 1:
        return 0
    tree = math.ceil(math.log2(n))
    return {"all_reduce": 2 * tree, "all_to_all": n - 1}.get(kind, tree)


def collective_seconds(cluster: Cluster, kind: str, bytes_sent: int, ranks: Sequence[int]) -> float:
    """Seconds of one collective over the global `ranks`, of which each sends `bytes_sent` bytes."""
    link = cluster.link(ranks)
    return rounds(kind, len(ranks)) * link.latency + bytes_sent / link.bandwidth


def compute_seconds(device: Device, operations: int, bytes_moved: int, itemsize: int, fused: bool = False) -> float:
    """Seconds of one operator.

    Args:
        operations: floating-point operations.
        bytes_moved: bytes read and written.
        itemsize: bytes of an element.
        fused: it is part of a kernel that was launched for another operator.
    """
    busy = max(operations / device.operations_per_second(itemsize), bytes_moved / device.memory)
    return busy if fused else busy + device.launch
