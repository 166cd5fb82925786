"""Seconds of NCCL's collectives, by the model with which it chooses among its algorithms.

NCCL takes the fastest of a ring and, for an all-reduce, a tree, each with three protocols: LL and LL128 send flags with
the data and start sooner, Simple has the whole bandwidth. With one rank per host, all-gathers and reduce-scatters also
have PAT, whose messages are logarithmic in number. One of these takes

    seconds = base + steps inside of hosts * hop inside + steps between hosts * hop between + bytes / bandwidth

A ring of n ranks on h hosts makes n - 1 steps, h - 1 of them between hosts, and twice as many in an all-reduce. It
enters and leaves each host once, over as many network cards as the host has ranks: all ranks of a host together carry
what one of them sends. An all-to-all sends what stays in the host and what leaves it at the same time, each rank over
its own card. Bandwidth, start-up times and shares of the protocols are those of NCCL's ``src/graph/tuning.cc`` (2.30),
but for all-to-alls, which it does not model. Hops are relative to the latencies of the links, so that a slower link
has slower ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Hops(NamedTuple):
    """The hosts of a group, and what it sends over.

    Attributes:
        ranks, hosts: numbers of them.
        inside, between: latencies of the links, seconds; bandwidth_inside, bandwidth: bytes per second of one rank.
    """

    ranks: int
    hosts: int
    inside: float
    bandwidth_inside: float
    between: float
    bandwidth: float

    @property
    def per_host(self) -> int:
        """Ranks of a host."""
        return max(1, self.ranks // self.hosts)


class _Protocol(NamedTuple):
    """Seconds to start and of a hop; `alone`: between hosts with one rank each, where nothing hides it; `share` of the
    bandwidth, `at_most` so many bytes per second between hosts."""

    base: float
    inside: float
    between: float
    alone: float
    share: float
    at_most: float = math.inf


#: Latencies of links for which the hops below are meant: NVLink, InfiniBand.
_INSIDE, _BETWEEN = 3e-6, 8e-6
_LL = _Protocol(6.6e-6, 0.6e-6, 2.7e-6, 5.0e-6, 0.38, 20e9)
_RING = (
    _LL,
    _Protocol(14.0e-6, 1.9e-6, 4.0e-6, 8.5e-6, 0.92),
    _Protocol(8.4e-6, 3.4e-6, 14.0e-6, 14.0e-6, 1.0),
)
_TREE = (
    _Protocol(6.8e-6, 0.6e-6, 5.0e-6, 5.0e-6, 0.92 / 3.8, 20e9),
    _Protocol(14.0e-6, 1.25e-6, 8.5e-6, 8.5e-6, 0.92 * 0.85),
    _Protocol(8.4e-6, 4.0e-6, 14.0e-6, 14.0e-6, 0.92),
)
#: PAT: its part of the bandwidth, seconds to start, of a message, and for each rank.
_PAT_SHARE, _PAT_BASE, _PAT_MESSAGE, _PAT_RANK = 0.75, 8.0e-6, 4.0e-6, 2.8e-6


def seconds(kind: str, sent: float, group: Hops) -> float:
    """Seconds of a collective in which each rank of a group sends `sent` bytes, as a ring counts them."""
    inside, between = group.bandwidth_inside, group.bandwidth
    if kind == "all_to_all":
        leaves = sent * (group.ranks - group.per_host) / (group.ranks - 1)
        stays = (sent - leaves) / inside
        return _start(_LL, group, group.ranks - group.per_host) + max(stays, leaves / between)
    carried = inside if group.hosts == 1 else min(inside, between * group.per_host)
    rounds = 2 if kind == "all_reduce" else 1
    found = [
        rounds * _start(this, group) - (rounds - 1) * this.base + sent / _rate(this, group, carried) for this in _RING
    ]
    if kind == "all_reduce":
        found += [_tree_start(this, group) + sent / _rate(this, group, carried) for this in _TREE]
    elif kind in ("all_gather", "reduce_scatter") and group.hosts == group.ranks:
        starts = _PAT_BASE + math.log2(group.hosts) * _PAT_MESSAGE * group.between / _BETWEEN + group.ranks * _PAT_RANK
        found.append(starts + sent / (_PAT_SHARE * carried))
    return min(found)


def _rate(this: _Protocol, group: Hops, carried: float) -> float:
    return min(this.share * carried, this.at_most) if group.hosts > 1 else this.share * carried


def _start(this: _Protocol, group: Hops, steps_between: int | None = None) -> float:
    """Seconds of the messages of a ring, or of pairwise exchanges, so many of them between hosts."""
    outside = group.hosts - 1 if steps_between is None else steps_between
    hop = this.alone if group.per_host == 1 else this.between
    inside = (group.ranks - 1 - outside) * this.inside * group.inside / _INSIDE
    return this.base + inside + outside * hop * group.between / _BETWEEN


def _tree_start(this: _Protocol, group: Hops) -> float:
    """Seconds of the messages of a tree: a chain inside of each host, up and down."""
    inside = (group.per_host - 1) * this.inside * group.inside / _INSIDE
    return this.base + 2 * (inside + math.log2(group.hosts) * this.between * group.between / _BETWEEN)
