"""Lower bound on the elements that the busiest rank sends between two specs; prunes the search.

The busiest rank sends at least as much as the average rank, and all ranks together send at least

    without a sum          elements that each rank needs and does not hold yet, over all ranks
    a sum of n terms       for each element n - 1 times, until the first rank has the sum of it, and once more for each
                           other rank that is to hold it: a rank holds one term, and one that has the sum later receives
                           something later
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate
from dtensor_compile.planner.shard_intervals import Cut, common, cuts_of, held_intervals, length

State = tuple[Placement, ...]
Cuts = tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=1 << 14)
def sent_lower_bound(before: State, after: State, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Lower bound on the elements that the busiest rank sends on the way from `before` to `after`, for any steps.

    0 if the result is partial: its terms may be any.
    """
    if before == after or any(isinstance(p, Partial) for p in after):
        return 0
    whole, copies = math.prod(shape), math.prod(n for n, p in zip(mesh_shape, after) if isinstance(p, Replicate))
    terms = math.prod(n for n, p in zip(mesh_shape, before) if isinstance(p, Partial))
    if terms > 1:
        return whole * (terms + copies - 2) // math.prod(mesh_shape)
    kept = np.ones((1,) * len(mesh_shape), dtype=np.int64)
    for dim, size in enumerate(shape):
        kept = kept * _in_common(
            cuts_of(before, mesh_shape, dim), cuts_of(after, mesh_shape, dim), size, len(mesh_shape)
        )
    each = math.prod(
        n for n, axis in zip(mesh_shape, kept.shape) if axis == 1
    )  # ranks that differ only along these keep equally many elements
    return (whole * copies - int(kept.sum()) * each) // math.prod(mesh_shape)


@functools.lru_cache(maxsize=1 << 12)
def _in_common(old: Cuts, new: Cuts, size: int, mesh_dims: int) -> np.ndarray:
    """Elements of a tensor dim that a rank holds under both, by its coordinate along the mesh dims that shard it."""
    along = [1] * mesh_dims
    for i, n, _ in (*old, *new):
        along[i] = n
    result = np.empty(along, dtype=np.int64)
    for place in np.ndindex(*along):
        result[place] = length(common(held_intervals(_at(old, place), size), held_intervals(_at(new, place), size)))
    result.setflags(write=False)  # cached and shared
    return result


def _at(cuts: Cuts, place: Sequence[int]) -> tuple[Cut, ...]:
    return tuple((n, pieces, place[i]) for i, n, pieces in cuts)
