"""Exchanges: one all-to-all in which every rank receives exactly the elements that it lacks.

In: the specs before and after. Out: an `ExchangeTable`: for each pair of ranks of a group, whether the first sends to
the second. It sends the intersection of what it holds and what the other needs, so no rank receives an element twice,
or one that it has:

    S(0)S(1) -> S(1)S(0) on a 2x2 mesh        (0,1) and (1,0) swap their blocks, (0,0) and (1,1) keep theirs
    RS(0) -> S(0)S(0)                         each rank receives the part of its quarter that is in the other half

If several ranks hold the same block, a receiver that holds it serves itself; others are served by the holder with the
least to send, longest demand first (R. Graham: Bounds on Multiprocessing Timing Anomalies, 1969); demands are split if
that leaves holders idle. If ranks hold terms of a sum, a rank needs its part of each term and adds them in the order of
the terms.

The step is legal if the group of each rank holds all elements that the rank needs, which is checked by counting: shards
may be uneven or strided.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtensor_compile.compat.dtensor.specs import Partial, Placement
from dtensor_compile.planner import shard_intervals as shards
from dtensor_compile.planner.shard_intervals import CUTS, Intervals, cuts_of, held_intervals, is_cut
from dtensor_compile.planner.step_costs import local_sizes

#: Maximum number of pairs of ranks for a table, which takes some milliseconds to compute at that size.
MOST_PAIRS = 1 << 20

#: Reductions that ranks apply to received terms.
REDUCES = ("sum", "min", "max")

State = tuple[Placement, ...]
Dims = tuple[int, ...]


@dataclass(frozen=True)
class ExchangeTable:
    """The senders and receivers in the group of a rank.

    Attributes:
        mesh_dims: mesh dims that the group spans.
        members: coordinates along `mesh_dims` of its ranks, row-major.
        senders: per member, the members that send to it (including itself, if it keeps something), in order.
        terms: per member, the index of its term of the sum; 0 without a sum.
        split: the tensor dim along which demands are split.
        shares: for a sender and a receiver that share a demand with others, first and last index along `split` in their
            intersection.
    """

    mesh_dims: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    senders: tuple[tuple[int, ...], ...]
    terms: tuple[int, ...]
    split: int
    shares: Mapping[tuple[int, int], tuple[int, int]]

    def part(
        self, sender: int, receiver: int, has: Mapping[int, Intervals], needs: Mapping[int, Intervals]
    ) -> dict[int, Intervals]:
        """The part that `sender` sends to `receiver`, per tensor dim."""
        parts = {d: shards.common(has[d], needs[d]) for d in has}
        if (sender, receiver) in self.shares:
            parts[self.split] = shards.section(parts[self.split], *self.shares[sender, receiver])
        return parts


@dataclass(frozen=True)
class Traffic:
    """Elements that the busiest rank sends to others, and the maximum number of partners of a rank."""

    elements: int
    partners: int


def changed_dims(before: Sequence[Placement], after: Sequence[Placement], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The tensor dims that the two specs shard differently."""
    touched = {p.dim for a, b in zip(before, after) if a != b for p in (a, b) if is_cut(p)}
    return tuple(d for d in sorted(touched) if cuts_of(before, mesh_shape, d) != cuts_of(after, mesh_shape, d))


@functools.lru_cache(maxsize=1 << 14)
def traffic(before: State, after: State, mesh_dims: Dims, mesh_shape: Dims, shape: Dims) -> Traffic | None:
    """Traffic of an exchange over `mesh_dims`; None if it cannot lead from `before` to `after`, or is too large to
    count.
    """
    dims = changed_dims(before, after, mesh_shape)
    group = math.prod(mesh_shape[i] for i in mesh_dims)
    around = _around(before, after, mesh_dims, mesh_shape, dims)
    if group * group * math.prod(mesh_shape[i] for i in around) > MOST_PAIRS:
        return None
    kept = math.prod(size for d, size in enumerate(local_sizes(before, mesh_shape, shape)) if d not in dims)
    most, partners = 0, 0
    for place in itertools.product(*(range(mesh_shape[i]) for i in around)):
        coordinate = [0] * len(mesh_shape)
        for i, c in zip(around, place):
            coordinate[i] = c
        found = _assign(before, after, mesh_dims, mesh_shape, shape, tuple(coordinate))
        if found is None:
            return None
        sent = found.sent
        away = sent.copy()
        np.fill_diagonal(away, 0)
        most = max(most, int(away.sum(1).max()))
        partners = max(partners, int((away > 0).sum(1).max()))
    return Traffic(most * kept, partners)


def _around(
    before: State, after: State, mesh_dims: Sequence[int], mesh_shape: Sequence[int], dims: Sequence[int]
) -> list[int]:
    """Mesh dims outside of the group on which the table depends."""
    cut = {i for state in (before, after) for d in dims for i, _, _ in cuts_of(state, mesh_shape, d)}
    return sorted(cut - set(mesh_dims))


def table(
    before: State, after: State, mesh_dims: Dims, mesh_shape: Dims, shape: Dims, coordinate: Dims
) -> ExchangeTable:
    """The table of the group of the rank at `coordinate`."""
    found = _assign(before, after, mesh_dims, mesh_shape, shape, coordinate)
    assert found is not None, "an exchange that `traffic` refuses is part of no plan"
    members = tuple(itertools.product(*(range(mesh_shape[i]) for i in mesh_dims)))
    senders = tuple(tuple(int(p) for p in np.flatnonzero(found.sent[:, q])) for q in range(len(members)))
    return ExchangeTable(mesh_dims, members, senders, found.terms, found.split, found.shares)


@dataclass(frozen=True, eq=False)
class _Assignment:
    """Elements from each member to each (over the dims that change), and other fields as in `ExchangeTable`."""

    sent: np.ndarray
    terms: tuple[int, ...]
    split: int
    shares: Mapping[tuple[int, int], tuple[int, int]]


@functools.lru_cache(maxsize=4096)
def _assign(
    before: State, after: State, mesh_dims: Dims, mesh_shape: Dims, shape: Dims, around: Dims
) -> _Assignment | None:
    """The assignment of senders to receivers; None if an element is missing."""
    dims = changed_dims(before, after, mesh_shape)
    members = list(itertools.product(*(range(mesh_shape[i]) for i in mesh_dims)))
    places = []
    for member in members:
        coordinate = list(around)
        for i, c in zip(mesh_dims, member):
            coordinate[i] = c
        places.append(coordinate)
    common = np.ones((len(members), len(members)), dtype=np.int64)
    needed = np.ones(len(members), dtype=np.int64)
    overlaps = {}
    for d in dims:
        old, new = cuts_of(before, mesh_shape, d), cuts_of(after, mesh_shape, d)
        has, needs = (
            [held_intervals(tuple((n, k, at[i]) for i, n, k in cuts), shape[d]) for at in places] for cuts in (old, new)
        )
        overlaps[d], total = overlap(has, needs)
        common *= overlaps[d]
        needed *= total
    summed = [k for k, i in enumerate(mesh_dims) if isinstance(before[i], Partial)]
    copies = [k for k, i in enumerate(mesh_dims) if not isinstance(before[i], (Partial, *CUTS))]
    number: dict[tuple[int, ...], int] = {}
    terms = tuple(number.setdefault(tuple(member[k] for k in summed), len(number)) for member in members)
    blocks: dict[tuple[int, ...], list[int]] = {}
    for p, member in enumerate(members):
        blocks.setdefault(tuple(c for k, c in enumerate(member) if k not in copies), []).append(p)
    split = max(dims, key=lambda d: int(overlaps[d].max()), default=0)

    def like(p: int, q: int) -> bool:
        return all(members[p][k] == members[q][k] for k in copies)

    sent, shares = serve(common, list(blocks.values()), overlaps.get(split, common), like)
    of_term = np.array(terms)
    for term in range(len(number)):
        if not np.array_equal(sent[of_term == term].sum(0), needed):
            return None
    return _Assignment(sent, terms, split, shares)


def serve(
    common: np.ndarray,
    blocks: Sequence[Sequence[int]],
    indices: np.ndarray,
    like: Callable[[int, int], bool] | None = None,
) -> tuple[np.ndarray, dict[tuple[int, int], tuple[int, int]]]:
    """Chooses which of the members that hold the same block sends it to those that need it.

    Args:
        common: ``[p, q]``: elements that member p holds and member q needs.
        blocks: members with the same block; a member is in one of them at most.
        indices: ``[p, q]``: number of indices of those elements along the dim along which demands are split.
        like: whether one member is nearer to another than others are, by position.

    Returns:
        elements from each member to each; `ExchangeTable.shares`.
    """
    sent = np.zeros_like(common)
    shares: dict[tuple[int, int], tuple[int, int]] = {}
    for holders in blocks:
        if len(holders) == 1:  # no choice
            sent[holders[0]] = common[holders[0]]
            continue
        demand = common[holders[0]].tolist()
        for p in holders:
            sent[p, p] = demand[p]
        asking = sorted(
            (q for q, amount in enumerate(demand) if amount and q not in holders), key=lambda q: (-demand[q], q)
        )
        near = {(p, q): like(p, q) for p in holders for q in asking} if like else {}
        load = dict.fromkeys(holders, 0)
        served: list[_Served] = []
        for q in asking:
            source = min(holders, key=lambda p: (load[p], not near.get((p, q)), p))
            load[source] += demand[q]
            served.append((source, q, demand[q], None))
        fair = -(-sum(load.values()) // len(holders))
        if max(load.values()) > fair:
            halves = list(_split(holders, [(q, demand[q], int(indices[holders[0], q])) for q in asking], fair))
            if _most(halves) < max(load.values()):
                served = halves
        for source, q, amount, share in served:
            sent[source, q] = amount
            if share is not None:
                shares[source, q] = share
    return sent, shares


_Served = tuple[int, int, int, tuple[int, int] | None]


def _split(holders: Sequence[int], demands: Sequence[tuple[int, int, int]], fair: int) -> Iterator[_Served]:
    """Assigns demands (receiver, elements, indices along the split dim) to one holder after the other, up to `fair`
    elements each.
    """
    place, load = 0, 0
    for q, amount, indices in demands:
        each, first = amount // indices, 0
        while first < indices:
            room = max(0, (fair - load) // each)
            last = indices if place == len(holders) - 1 else min(indices, first + room)
            if last > first:
                share = None if (first, last) == (0, indices) else (first, last)
                yield holders[place], q, (last - first) * each, share
                load, first = load + (last - first) * each, last
            if first < indices:
                place, load = place + 1, 0


def _most(served: Sequence[_Served]) -> int:
    load: dict[int, int] = {}
    for source, _, amount, _ in served:
        load[source] = load.get(source, 0) + amount
    return max(load.values())


def overlap(has: Sequence[Intervals], needs: Sequence[Intervals]) -> tuple[np.ndarray, np.ndarray]:
    """Elements in common of each of `has` with each of `needs`, and the elements of each of `needs`."""
    edges = sorted({edge for parts in {*has, *needs} for part in parts for edge in part})
    if len(edges) < 2:
        return np.zeros((len(has), len(needs)), dtype=np.int64), np.zeros(len(needs), dtype=np.int64)
    index = {edge: k for k, edge in enumerate(edges)}
    sizes = np.diff(np.array(edges, dtype=np.int64))

    def rows(lists: Sequence[Intervals]) -> np.ndarray:
        result = np.zeros((len(lists), len(sizes)), dtype=np.int64)
        for row, parts in zip(result, lists):
            for start, end in parts:
                row[index[start] : index[end]] = 1
        return result

    # float64 multiplies fast, exact up to 2**53
    left, right, weights = (numbers.astype(np.float64) for numbers in (rows(has), rows(needs), sizes))
    return ((left * weights) @ right.T).astype(np.int64), (right @ weights).astype(np.int64)
