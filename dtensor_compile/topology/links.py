"""Estimated seconds of collectives and operators, from a few numbers of the machine.

Collectives, with n ranks, B bytes that one rank sends, a link of bandwidth W (bytes/s) and start-up time a (s per
message):

    seconds = rounds(kind, n) a + f B / W

    all_gather, reduce_scatter       log2 n rounds      recursive doubling, halving
    all_reduce                     2 log2 n             reduce_scatter, then all_gather
    all_to_all                       n - 1              pairwise exchange
    broadcast and the rest           log2 n             a tree

f is the backend's traffic relative to B (`topology/backends.py`), 1 for most. NCCL's are those of its own model
(`topology/nccl.py`).

(R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005; the model is
R. Hockney's, 1994. B is counted as in `dtensor_compile.planner.search`.) W is that of the slowest link that the ranks
of the group share: within a host, or between hosts. A ring enters and leaves a host once, so that m ranks of a host
together have m W between hosts, up to what they have within; in an all-to-all each has its own link. Where a link has
measured collectives, their rates take the place of the formula, which then only says how other numbers of ranks differ.

Operators, with F floating-point operations and M bytes read and written (S. Williams, A. Waterman, D. Patterson:
Roofline, 2009):

    seconds = max(F / peak, M / memory bandwidth) + launch

with the peak of TF32 for float32 where torch may use it, which by default it may not
(``torch.backends.cuda.matmul.fp32_precision``). Where achieved rates of the device are known, by kind and size of the
work, they replace the peaks, and include the launch (`topology/rates.py`).

These are estimates: they compare one program with another on one machine. They ignore fusion; what compute
loses beside communication is part of the schedule (`report/schedule.py`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dtensor_compile.topology import nccl, published_rates
from dtensor_compile.topology.backends import SEVERAL_UNDER_WAY, traffic
from dtensor_compile.topology.gpus import CPU, GPUS, V100, Device
from dtensor_compile.topology.published_rates import Measured


@dataclass(frozen=True)
class Link:
    """A link between two ranks, or what a group of ranks has of such links.

    Attributes:
        latency: seconds to start a message.
        bandwidth: bytes per second that one rank sends; all ranks of a host together, if the link is shared.
        shared: whether the ranks of a host send over it together (one network card for all, main memory), or each has
            its own.
        collectives: measured rates. For other numbers of ranks times are scaled as by the formula.
        hosts, per_host: of a group: the hosts on which it is, and its ranks on each (the least).
        inside: of a group on several hosts: the link within one.
    """

    latency: float
    bandwidth: float
    shared: bool = False
    collectives: tuple[Measured, ...] = ()
    hosts: int = 1
    per_host: int = 1
    inside: Link | None = None

    def share(self, ranks: int) -> Link:
        """The share of one of `ranks` that send at the same time."""
        if not self.shared or ranks <= 1:
            return self
        known = tuple(this._replace(rates=this.rates.times(this.ranks / ranks)) for this in self.collectives)
        return replace(self, bandwidth=self.bandwidth / ranks, shared=False, collectives=known)

    def of_group(self, hosts: int, per_host: int, inside: Link | None = None) -> Link:
        """What a group of ranks has of it."""
        return replace(self, hosts=hosts, per_host=per_host, inside=inside if hosts > 1 else None)

    def rate(self, kind: str, n: int) -> float:
        """Bytes per second at which each of the `n` ranks of a group sends in a collective of that kind."""
        if self.inside is None:
            return self.bandwidth
        if kind == "all_to_all":
            return min(self.inside.bandwidth, self.bandwidth * (n - 1) / (n - self.per_host))
        return min(self.inside.bandwidth, self.bandwidth * self.per_host)

    def nearest(self, kind: str, n: int) -> list[Measured]:
        """Of the measured collectives of a kind those with the next smaller and the next larger number of ranks.

        What whole hosts measured says nothing of groups with one rank on each."""
        alone = self.hosts > 1 and self.per_host == 1
        known = [this for this in self.collectives if this.kind == kind and not (alone and this.hosts)]
        fewer = max((this for this in known if this.ranks <= n), key=lambda this: this.ranks, default=None)
        more = min((this for this in known if this.ranks > n), key=lambda this: this.ranks, default=None)
        return [this for this in (fewer, more) if this is not None]


@dataclass(frozen=True)
class Cluster:
    """Hosts of `ranks_per_host` ranks each, in order of rank: the topology of a job.

    Attributes:
        name: for reports and errors.
        ranks_per_host: 0 if all ranks are on one host.
        inside, between: links within a host and between hosts.
        device: device of a rank.
        mesh_dims: links along mesh dims by their names, if measured or known; they take precedence over the other two.
        backend: communication backend (``"gloo"``, ``"nccl"``; see `topology/backends.py`). Empty: textbook traffic.
    """

    name: str
    ranks_per_host: int
    inside: Link
    between: Link
    device: Device
    mesh_dims: Mapping[str, Link] = field(default_factory=dict, hash=False)
    backend: str = ""

    def link(self, ranks: Sequence[int], job: int = 0) -> Link:
        """The slowest link that a group of global ranks uses.

        Args:
            job: ranks that send at the same time, over all groups; by default those of this group.
        """
        on_hosts = Counter(rank // self.ranks_per_host if self.ranks_per_host else 0 for rank in ranks)
        sending = min(self.ranks_per_host or job or len(ranks), job or len(ranks))
        inside = self.inside.share(sending)
        link = inside if len(on_hosts) <= 1 else self.between.share(sending)
        return link.of_group(len(on_hosts), min(on_hosts.values()), inside)

    def is_alike(self, ranks: Sequence[int]) -> bool:
        """Whether the other groups of the same shape use a link as this group of global ranks does, so that estimates
        for it are those of every rank: it is wider than a host, or a whole number of such groups fills one. False for
        groups without a constant stride inside of a host, whose shape does not say where the others lie."""
        ordered = sorted(ranks)
        strides = {after - before for before, after in itertools.pairwise(ordered)}
        if self.ranks_per_host < 2 or not strides or ordered[-1] - ordered[0] >= self.ranks_per_host:
            return True
        return len(strides) == 1 and self.ranks_per_host % (strides.pop() * len(ordered)) == 0

    def dim_link(self, name: str | None, groups: Sequence[Sequence[int]]) -> Link:
        """The link along a mesh dim: the one for its name, else the slowest that any of its `groups` of global ranks
        uses.

        The same on every rank, although a rank is part of one group only.
        """
        job = sum(map(len, groups))
        if name is not None and name in self.mesh_dims:
            return self.mesh_dims[name].share(min(self.ranks_per_host or job, job))
        return slowest([self.link(group, job) for group in groups])


def slowest(links: Sequence[Link]) -> Link:
    """The link of the slowest of several groups: the longest latency, and else what that with the lowest rate has."""
    lowest = min(links, key=lambda link: (link.bandwidth, link.per_host))
    return replace(lowest, latency=max(link.latency for link in links))


def together(links: Sequence[Link]) -> Link:
    """The effective link of groups over several mesh dims, from those along each: the slowest, on the hosts and ranks
    of all of them."""
    lowest = slowest(links)
    hosts, per_host = (math.prod(getattr(link, name) for link in links) for name in ("hosts", "per_host"))
    return lowest.of_group(hosts, per_host, lowest.inside)


#: Parts of vendors' bandwidths that collectives reach: NCCL counts on 18 x 20.6 GB/s of the 450 GB/s of NVLink 4
#: (``src/graph/topo.h``), and published runs on two to eight hosts reach this much of their network cards
#: (`topology/published_rates.py`).
_OF_NVLINK, _OF_NETWORK = 0.82, 0.92

#: Links by name. Bandwidth: what is reached of vendors' figures per device and direction (NVLink 2 to 5; PCIe with 16
#: lanes; InfiniBand per port), for Ethernet the line rate. Latency: typical of a collective's message through NCCL, for
#: Ethernet through gloo over TCP. Loopback is a laptop's: copies through main memory, which all ranks share.
#: Collectives: published.
LINKS: dict[str, Link] = {
    "nvlink2": Link(3e-6, _OF_NVLINK * 150e9),
    "nvlink3": Link(3e-6, _OF_NVLINK * 300e9, collectives=published_rates.NVLINK3),
    "nvlink4": Link(3e-6, _OF_NVLINK * 450e9, collectives=published_rates.NVLINK4),
    "nvlink5": Link(3e-6, _OF_NVLINK * 900e9, collectives=published_rates.NVLINK5),
    "pcie3": Link(6e-6, _OF_NVLINK * 15.75e9),
    "pcie4": Link(6e-6, _OF_NVLINK * 31.5e9),
    "pcie5": Link(6e-6, _OF_NVLINK * 63e9),
    "infiniband-edr": Link(8e-6, _OF_NETWORK * 12.5e9),
    "infiniband-hdr": Link(8e-6, _OF_NETWORK * 25e9),
    "infiniband-ndr": Link(8e-6, _OF_NETWORK * 50e9, collectives=published_rates.NDR),
    "infiniband-ndr-b200": Link(8e-6, _OF_NETWORK * 50e9, collectives=published_rates.NDR_B200),
    "ethernet-1g": Link(1e-4, 125e6, shared=True),
    "ethernet-10g": Link(5e-5, 1.25e9, shared=True),
    "ethernet-25g": Link(3e-5, 3.125e9, shared=True),
    "ethernet-100g": Link(2e-5, 12.5e9, shared=True),
    "loopback": Link(5e-5, 4e9, shared=True),
}

#: Clusters by name: vendors' figures, and laptop-like hosts.
CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        Cluster("h100", 8, LINKS["nvlink4"], LINKS["infiniband-ndr"], GPUS["h100"].device, backend="nccl"),
        Cluster("h200", 8, LINKS["nvlink4"], LINKS["infiniband-ndr"], GPUS["h200"].device, backend="nccl"),
        Cluster("a100", 8, LINKS["nvlink3"], LINKS["infiniband-hdr"], GPUS["a100"].device, backend="nccl"),
        Cluster("b200", 8, LINKS["nvlink5"], LINKS["infiniband-ndr-b200"], GPUS["b200"].device, backend="nccl"),
        Cluster("v100", 8, LINKS["nvlink2"], LINKS["infiniband-edr"], V100, backend="nccl"),
        Cluster("a100-pcie4", 8, LINKS["pcie4"], LINKS["ethernet-100g"], GPUS["a100"].device, backend="nccl"),
        Cluster("h100-pcie5", 8, LINKS["pcie5"], LINKS["ethernet-100g"], GPUS["h100"].device, backend="nccl"),
        Cluster("cpu-1gbit", 1, LINKS["loopback"], LINKS["ethernet-1g"], CPU, backend="gloo"),
        Cluster("cpu-10gbit", 1, LINKS["loopback"], LINKS["ethernet-10g"], CPU, backend="gloo"),
        Cluster("cpu-loopback", 0, LINKS["loopback"], LINKS["loopback"], CPU, backend="gloo"),
    )
}


def rounds(kind: str, n: int) -> int:
    """Number of sequential messages in a collective of that kind over `n` ranks."""
    if n <= 1:
        return 0
    tree = math.ceil(math.log2(n))
    return {"all_reduce": 2 * tree, "all_to_all": n - 1}.get(kind, tree)


def collective_seconds(cluster: Cluster, kind: str, bytes_sent: float, ranks: Sequence[int], job: int = 0) -> float:
    """Seconds of one collective over the global `ranks`, each of which sends `bytes_sent` bytes.

    Args:
        job: as in `Cluster.link`.
    """
    return seconds_over(cluster.link(ranks, job), cluster.backend, kind, bytes_sent, len(ranks))


def seconds_over(link: Link, backend: str, kind: str, bytes_sent: float, n: int, messages: int | None = None) -> float:
    """Seconds of one collective of `n` ranks over `link` (module docstring).

    Args:
        bytes_sent: bytes sent by one rank, as counted by `planner/step_costs.py`.
        messages: number of sequential messages, if the collective is not the textbook's (an exchange in which a rank
            has few partners).
    """
    if n <= 1:
        return 0.0
    if messages is not None:
        return messages * link.latency + traffic(backend, kind, n) * bytes_sent / link.bandwidth
    seconds = _formula(link, backend, kind, bytes_sent, n)
    known = link.nearest(kind, n)
    return _corrected(link, backend, seconds, bytes_sent, n, known) if known and seconds else seconds


def startup_seconds(cluster: Cluster, kind: str, ranks: Sequence[int]) -> float:
    """Seconds of a collective over the global `ranks` that sends next to nothing."""
    return collective_seconds(cluster, kind, 1, ranks)


def _formula(link: Link, backend: str, kind: str, bytes_sent: float, n: int) -> float:
    """Seconds of a collective without measured ones."""
    if backend == "nccl":
        within = link.inside or link
        return nccl.seconds(
            kind, bytes_sent, nccl.Hops(n, link.hosts, within.latency, within.bandwidth, link.latency, link.bandwidth)
        )
    return rounds(kind, n) * link.latency + traffic(backend, kind, n) * bytes_sent / link.rate(kind, n)


def _corrected(link: Link, backend: str, seconds: float, bytes_sent: float, n: int, known: Sequence[Measured]) -> float:
    """Seconds of a collective, corrected by measured ones with fewer and with more ranks, or with either.

    Where much is sent, both differ from the formula by the same factor; what a measured one takes besides changes as
    the time does in which nothing is sent. So a measured collective takes what it took."""
    kind, shape, ranks = known[0].kind, known[0], known[0].ranks
    factor, took = (math.log(value) for value in _measured(shape, link, backend, bytes_sent))
    if len(known) > 1:  # what whole groups of `n` ranks take is between what those two took
        part, ranks = math.log(n / ranks) / math.log(known[1].ranks / ranks), n
        other = [math.log(value) for value in _measured(known[1], link, backend, bytes_sent)]
        factor, took = factor + part * (other[0] - factor), took + part * (other[1] - took)
    group = _group_of(shape, link, ranks)
    besides = math.exp(took) - math.exp(factor) * _formula(group, backend, kind, bytes_sent, ranks)
    start = _formula(group, backend, kind, 0, ranks)
    starts = _formula(link, backend, kind, 0, n) / start if start else 1.0  # a measured link may have no latency
    return math.exp(factor) * seconds + besides * (starts if besides > 0 else min(1.0, starts))


def _measured(this: Measured, link: Link, backend: str, bytes_sent: float) -> tuple[float, float]:
    """What a measured collective takes relative to the formula where much is sent, and its seconds; for sizes outside
    of those that were measured they differ from the formula as for the nearest."""
    group = _group_of(this, link, this.ranks)

    def formula(size: float) -> float:
        return _formula(group, backend, this.kind, size, this.ranks)

    smallest, largest = this.rates.points[0][0], this.rates.points[-1][0]
    size = min(max(bytes_sent, smallest), largest)
    took = (
        this.rates.seconds(size)
        if size == bytes_sent
        else this.rates.seconds(size) * formula(bytes_sent) / formula(size)
    )
    return this.rates.seconds(largest) / formula(largest), took


def _group_of(this: Measured, link: Link, ranks: int) -> Link:
    """What a group of so many ranks has of a link that is spread as a measured one was."""
    per_host = this.ranks // this.hosts if this.hosts else link.per_host if link.hosts > 1 else ranks
    return link.of_group(max(1, ranks // per_host), min(ranks, per_host), link.inside)


def seconds_in_turn(link: Link, backend: str, kind: str, bytes_sent: float, n: int) -> tuple[float, float]:
    """Seconds of one collective of `n` ranks over `link`, and those by which it ends after another that was under way
    when it started: with a backend that has several under way (`topology/backends.py`), what one takes besides its
    bytes is over then.

    Args: as of `seconds_over`.
    """
    alone = seconds_over(link, backend, kind, bytes_sent, n)
    if backend not in SEVERAL_UNDER_WAY or n <= 1:
        return alone, alone
    return alone, min(alone, traffic(backend, kind, n) * bytes_sent / link.rate(kind, n))


def compute_seconds(
    device: Device, operations: int, bytes_moved: int, itemsize: int, fused: bool = False, kind: str = ""
) -> float:
    """Seconds of one operator.

    Args:
        operations: floating-point operations.
        bytes_moved: bytes read and written.
        itemsize: bytes of an element.
        fused: whether it is part of a kernel that was launched for another operator.
        kind: of the operations, as `dtensor_compile.topology.rates.Achieved.compute_seconds` takes it.
    """
    # What ``torch.set_float32_matmul_precision`` sets too; its getter raises where this setting was used.
    tf32 = device.exact is None or torch.backends.cuda.matmul.fp32_precision == "tf32"
    achieved = device.achieved
    computing = achieved.compute_seconds(operations, itemsize, tf32, kind) if achieved is not None else None
    if computing is None:
        computing = operations / device.operations_per_second(itemsize, tf32)
    if achieved is None:
        busy = max(computing, bytes_moved / device.memory)
        return busy if fused else busy + device.launch
    if fused:
        return max(computing, bytes_moved / achieved.memory.points[-1][1])
    return max(computing, achieved.memory.seconds(bytes_moved))
