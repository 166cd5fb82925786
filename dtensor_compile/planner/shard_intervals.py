"""The part of a tensor dim that a rank holds, in plain integers.

The mesh dims of a spec shard a tensor dim from left to right: ``S(d)`` takes one of n chunks of the rest (as
``torch.chunk``), ``_S(d,f)`` one of n chunks of each of f pieces. The result is an ascending list of intervals of the
global dim:

    mesh (2, 2), 8 rows    S(0)S(0)     at (1, 0): [4, 6)
                           _S(0,2)S(0)  at (1, 0): [2, 4)
                           R _S(0,2)    at (., 1): [2, 4) [6, 8)

Every rearrangement between ranks, and every test whether one is possible, follows from these lists, including uneven
shards and shards that nest in another order than left to right.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeGuard

from dtensor_compile.compat.dtensor.specs import Placement, Shard, StridedShard

#: Placements that shard a tensor dim.
CUTS = (Shard, StridedShard)

#: Ascending, disjoint, not empty: start and end.
Intervals = tuple[tuple[int, int], ...]

#: Size of a mesh dim, number of pieces that it cuts, coordinate along it.
Cut = tuple[int, int, int]


def is_cut(placement: Placement) -> TypeGuard[Shard | StridedShard]:
    """Whether a placement shards a tensor dim.

    It compares types: ``isinstance`` calls torch's metaclass, which dominates the time.
    """
    return type(placement) in CUTS


def pieces_of(placement: Placement) -> int:
    """Number of pieces into which a placement splits a dim before it shards each of them."""
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def cutting(placements: Sequence[Placement], dim: int) -> tuple[int, ...]:
    """The mesh dims that shard tensor dim `dim`, from left to right."""
    return tuple(i for i, p in enumerate(placements) if is_cut(p) and p.dim == dim)


def cuts_of(placements: Sequence[Placement], mesh_shape: Sequence[int], dim: int) -> tuple[tuple[int, int, int], ...]:
    """Key of the shards of tensor dim `dim`: mesh dim, its size, pieces; equal if two specs shard it equally."""
    return tuple((i, mesh_shape[i], pieces_of(placements[i])) for i in cutting(placements, dim) if mesh_shape[i] > 1)


def intervals(
    placements: Sequence[Placement], mesh_shape: Sequence[int], dim: int, size: int, coordinate: Sequence[int]
) -> Intervals:
    """The intervals of tensor dim `dim` of `size` elements that the rank at `coordinate` holds."""
    cuts = tuple((n, pieces, coordinate[i]) for i, n, pieces in cuts_of(placements, mesh_shape, dim))
    return held_intervals(cuts, size)


@functools.lru_cache(maxsize=1 << 16)
def held_intervals(cuts: tuple[Cut, ...], size: int) -> Intervals:
    """The intervals of ``[0, size)`` that are left after these cuts."""
    if not cuts:
        return ((0, size),) if size else ()
    return _cut(held_intervals(cuts[:-1], size), *cuts[-1])


def _cut(whole: Intervals, n: int, pieces: int, coordinate: int) -> Intervals:
    total = length(whole)
    piece = -(-total // pieces)
    wanted = []
    for start in range(0, total, piece) if total else ():
        size = min(piece, total - start)
        chunk = -(-size // n)
        first = min(chunk * coordinate, size)
        wanted.append((start + first, start + min(first + chunk, size)))
    result: list[tuple[int, int]] = []
    position = 0
    for start, end in whole:  # `wanted` indexes into the list: map back to the global dim
        for first, last in wanted:
            low, high = max(first, position), min(last, position + end - start)
            if low < high:
                low, high = low - position + start, high - position + start
                if result and result[-1][1] == low:
                    result[-1] = (result[-1][0], high)
                else:
                    result.append((low, high))
        position += end - start
    return tuple(result)


def length(parts: Intervals) -> int:
    return sum(end - start for start, end in parts)


def chunk_sizes(size: int, parts: Sequence[int]) -> set[int]:
    """The sizes of all pieces of `size` rows that are cut into so many parts, each piece again into so many, ..."""
    sizes = {size}
    for n in parts:
        sizes = {
            max(0, min(chunk, whole - chunk * k)) for whole in sizes for chunk in (-(-whole // n),) for k in range(n)
        }
    return sizes


@functools.lru_cache(maxsize=1 << 16)
def common(a: Intervals, b: Intervals) -> Intervals:
    """The intersection of two lists of intervals."""
    result = []
    for start, end in a:
        for first, last in b:
            low, high = max(start, first), min(end, last)
            if low < high:
                result.append((low, high))
    return tuple(result)


def section(parts: Intervals, first: int, last: int) -> Intervals:
    """The elements of `parts` with indices from `first` to before `last`."""
    result, position = [], 0
    for start, end in parts:
        low, high = max(first, position), min(last, position + end - start)
        if low < high:
            result.append((low - position + start, high - position + start))
        position += end - start
    return tuple(result)


def within(parts: Intervals, whole: Intervals) -> tuple[tuple[int, int], ...]:
    """Positions of `parts` in the tensor that holds `whole`: start and length of each, neighbours joined.

    `whole` has to contain `parts`.
    """
    result: list[tuple[int, int]] = []
    for start, end in parts:
        position = 0
        for first, last in whole:
            low, high = max(start, first), min(end, last)
            if low < high:
                at = position + low - first
                if result and sum(result[-1]) == at:
                    result[-1] = (result[-1][0], result[-1][1] + high - low)
                else:
                    result.append((at, high - low))
            position += last - first
    return tuple(result)


def inner_cut(placements: Sequence[Placement], mesh_shape: Sequence[int], mesh_dim: int, dim: int) -> Placement:
    """The placement with which `mesh_dim` shards the part of tensor dim `dim` that each rank already holds.

    For a mesh dim to the right of all that shard it, this is ``S(dim)``. Left of some, the shard is nested in theirs
    although specs read from left to right, which a strided shard expresses. Correct if all shards of the dim are even.
    """
    pieces = 1
    for i in cutting(placements, dim):
        pieces *= mesh_shape[i] if i > mesh_dim else 1
    return Shard(dim) if pieces == 1 else StridedShard(dim, split_factor=pieces)


def cuts_evenly(placements: Sequence[Placement], mesh_shape: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the local tensors of a spec, of a global tensor of `shape`, have the same sizes on every rank of the
    mesh.
    """
    parts = [1] * len(shape)
    for placement, n in zip(placements, mesh_shape):
        if isinstance(placement, CUTS):
            parts[placement.dim] *= n
    return not any(size % n for size, n in zip(shape, parts))
