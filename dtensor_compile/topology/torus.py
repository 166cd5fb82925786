"""Maps axes of a logical mesh onto the axes of a torus.

Each logical axis gets some of the torus's axes, whole, so that their sizes multiply to its own: neighbours along it are
neighbours in the machine. Logical axes are served from the last to the first, as the last one communicates most by
convention. An axis prefers, in this order,

1. more torus axes: rings along several of them run at the same time;
2. axes of equal size, whose rings end together;
3. the first axes.

If a choice leaves an earlier logical axis without a fit, the next one is tried, so that a layout is found if one
exists.

With `split`, if there is no such layout, a logical axis may also get a divisor of a torus axis, and the rest goes to
others. Every choice can be completed then, as the remaining torus axes have the prime factors of the remaining logical
axes. The order is torch_xla's, so that a mesh has its devices in the same places there and here; an axis prefers

1. more devices along torus axes that it has whole;
2. more such axes;
3. to take the rest of torus axes that are split already, before it splits others;
4. more of the first axes.

    torus 4x4x16, mesh (16, 16)    ->  last axis: x and y (two axes before one), first axis: z
    torus 4x4, mesh (2, 2, 4)      ->  last axis: x; the others would split y: an error without `split`
    torus 4x4, mesh (2, 8)         ->  with `split`, last axis: x and half of y; first axis: the other half of y
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from dtensor_compile.errors import MeshError

#: Per logical axis the part of each torus axis that it gets; 1 for none.
Assignment = tuple[tuple[int, ...], ...]


def assign_axes(torus: Sequence[int], mesh_shape: Sequence[int], split: bool = False) -> Assignment:
    """The part of each torus axis that each logical axis gets.

    Raises:
        MeshError: the number of devices differs, or no assignment exists without splitting a torus axis (or at all,
            with `split`).
    """
    if math.prod(torus) != math.prod(mesh_shape):
        have, want = math.prod(torus), math.prod(mesh_shape)
        raise MeshError(
            f"a mesh of shape {tuple(mesh_shape)} needs {want} devices, the network of shape {tuple(torus)} has {have}"
        )

    found = _serve(torus, mesh_shape, _whole_parts) or (_serve(torus, mesh_shape, _split_parts) if split else None)
    if found is None:
        hint = "" if split else "; allow_split_physical_axes=True lets two mesh axes share one axis of the network"
        raise MeshError(
            f"the axes of a mesh of shape {tuple(mesh_shape)} cannot be made of whole axes of a network of shape "
            f"{tuple(torus)}{hint}"
        )
    return found


#: The parts of the remaining torus axes that a logical axis of a size could take; the best first.
_Parts = Callable[[tuple[int, ...], tuple[int, ...], int], list[tuple[int, ...]]]


def _serve(torus: Sequence[int], mesh_shape: Sequence[int], parts: _Parts) -> Assignment | None:
    @functools.cache
    def serve(axis: int, free: tuple[int, ...]) -> Assignment | None:
        if axis < 0:
            return ()
        for part in parts(free, tuple(torus), mesh_shape[axis]):
            rest = serve(axis - 1, tuple(size // taken for size, taken in zip(free, part)))
            if rest is not None:
                return (*rest, part)
        return None

    return serve(len(mesh_shape) - 1, tuple(torus))


def _whole_parts(free: tuple[int, ...], torus: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    def order(part: tuple[int, ...]) -> tuple[object, ...]:
        taken = [i for i, d in enumerate(part) if d > 1]
        sizes = [part[i] for i in taken]
        return -len(taken), max(sizes, default=1) / min(sizes, default=1), taken

    choices = [[1, left] if left > 1 else [1] for left in free]
    return sorted((p for p in itertools.product(*choices) if math.prod(p) == size), key=order)


def _split_parts(free: tuple[int, ...], torus: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    def order(part: tuple[int, ...]) -> tuple[object, ...]:
        whole = [d for d, physical in zip(part, torus) if d == physical > 1]
        of_split = [d for d, left, physical in zip(part, free, torus) if left < physical]
        return -math.prod(whole), -len(whole), -math.prod(of_split), [-d for d in part]

    choices = [[d for d in range(1, left + 1) if left % d == 0] for left in free]
    return sorted((p for p in itertools.product(*choices) if math.prod(p) == size), key=order)


def lay_out(devices: np.ndarray, assignment: Assignment) -> np.ndarray:
    """The devices, given in the shape of the torus, in the shape of the mesh. If a torus axis is split, the later
    logical axes get its neighbours."""
    parts = np.array(assignment).reshape(len(assignment), devices.ndim)
    pieces = devices.reshape([int(d) for torus_axis in range(devices.ndim) for d in parts[:, torus_axis]])
    order = [
        torus_axis * len(assignment) + axis for axis in range(len(assignment)) for torus_axis in range(devices.ndim)
    ]
    return pieces.transpose(order).reshape([math.prod(map(int, row)) for row in parts])
