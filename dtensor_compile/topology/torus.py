"""Axes of a logical mesh onto the axes of a torus.

Each logical axis gets some of the torus's axes, whole, so that their sizes multiply to its own: neighbours along it are neighbours in
the machine. With `split`, one may also get a divisor of a torus axis, and the rest goes to another. Logical axes are served from the
last to the first, as the last one communicates most by convention. An axis prefers, in this order,

1. no split torus axis;
2. more torus axes: rings along several of them run at the same time;
3. axes of equal size, whose rings end together;
4. the first axes.

Where a choice leaves an earlier logical axis without a fit, the next one is tried, so that a layout is found where there is one.

    torus 4x4x16, mesh (16, 16)    ->  last axis: x and y (two axes before one), first axis: z
    torus 4x4, mesh (2, 2, 4)      ->  last axis: x; the others would split y: an error without `split`
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from dtensor_compile.errors import MeshError

#: Per logical axis the part of each torus axis that it gets; 1 where it gets none.
Assignment = tuple[tuple[int, ...], ...]


def assign_axes(torus: Sequence[int], mesh_shape: Sequence[int], split: bool = False) -> Assignment:
    """The part of each torus axis that each logical axis gets.

    Raises:
        MeshError: the number of devices differs, or no assignment exists without splitting a torus axis (or at all, with `split`).
    """
    if math.prod(torus) != math.prod(mesh_shape):
        have, want = math.prod(torus), math.prod(mesh_shape)
        raise MeshError(f"a mesh of shape {tuple(mesh_shape)} needs {want} devices, the network of shape {tuple(torus)} has {have}")

    @functools.cache
    def serve(axis: int, free: tuple[int, ...]) -> Assignment | None:
        if axis < 0:
            return ()
        for part in _parts(free, tuple(torus), mesh_shape[axis], split):
            rest = serve(axis - 1, tuple(size // taken for size, taken in zip(free, part)))
            if rest is not None:
                return (*rest, part)
        return None

    found = serve(len(mesh_shape) - 1, tuple(torus))
    if found is None:
        hint = "" if split else "; allow_split_physical_axes=True lets two mesh axes share one axis of the network"
        raise MeshError(
            f"the axes of a mesh of shape {tuple(mesh_shape)} cannot be made of whole axes of a network of shape {tuple(torus)}{hint}"
        )
    return found


def _parts(free: tuple[int, ...], torus: tuple[int, ...], size: int, split: bool) -> list[tuple[int, ...]]:
    """What a logical axis of that size could take of the torus axes, of which `free` is left; the best first."""

    def choices(left: int) -> list[int]:
        if not split:
            return [1, left] if left > 1 else [1]
        return [d for d in range(1, left + 1) if left % d == 0]

    def order(part: tuple[int, ...]) -> tuple[object, ...]:
        taken = [(i, d) for i, d in enumerate(part) if d > 1]
        splits = sum(d != torus[i] for i, d in taken)
        sizes = [d for _, d in taken]
        return splits, -len(taken), max(sizes, default=1) / min(sizes, default=1), [i for i, _ in taken]

    return sorted((p for p in itertools.product(*map(choices, free)) if math.prod(p) == size), key=order)


def lay_out(devices: np.ndarray, assignment: Assignment) -> np.ndarray:
    """The devices, given in the shape of the torus, in the shape of the mesh. Of a torus axis that is split, the later logical axes
    have the neighbours."""
    parts = np.array(assignment).reshape(len(assignment), devices.ndim)
    pieces = devices.reshape([int(d) for torus_axis in range(devices.ndim) for d in parts[:, torus_axis]])
    order = [torus_axis * len(assignment) + axis for axis in range(len(assignment)) for torus_axis in range(devices.ndim)]
    return pieces.transpose(order).reshape([math.prod(map(int, row)) for row in parts])
