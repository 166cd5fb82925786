"""Partition specs, as in torch_xla: the mesh axes that shard each dim of a tensor.

    partition spec    one entry per tensor dim: None, an axis (index or name), or a tuple of axes in the order in which
                      they split it
    (None, "tp")      on a mesh (dp, tp): dim 0 is not sharded, dim 1 has |tp| pieces
    (("tp", "dp"),)   dim 0 has |tp| pieces, each split into |dp| pieces

A spec names mesh axes per tensor dim, placements of a DTensor name a tensor dim per mesh dim. Axes that shard one dim
in an order other than that of the mesh are strided shards: with the mesh (dp, tp) the second spec is
``_S(0,|tp|)S(0)``, since dp splits the pieces that tp made. The split factor of an axis is the number of pieces made by
the axes that come before it in the entry and after it in the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard, StridedShard
from dtensor_compile.errors import PlacementError

Axis = int | str
PartitionSpec = tuple["Axis | tuple[Axis, ...] | None", ...]
#: A partition spec with indices of axes: per tensor dim the axes that shard it, in order.
Axes = tuple[tuple[int, ...], ...]


def spec_axes(
    spec: object, mesh_shape: Sequence[int], axis_names: Sequence[str] | None, what: str = "a partition spec"
) -> Axes:
    """The axes of each entry as indices; an empty tuple for a dim that is not sharded.

    Raises:
        PlacementError: the spec is not a tuple, an entry is nested twice or of another type, an axis is unknown, out of
            range or used twice.
    """
    if not isinstance(spec, (tuple, list)):
        raise PlacementError(
            f"{what} is a tuple with one entry per tensor dim, not {spec!r}; write ({spec!r},) for one dim"
        )
    axes = tuple([_entry_axes(entry, len(mesh_shape), axis_names, spec, what) for entry in spec])
    used = [axis for entry in axes for axis in entry]
    for axis in used:
        if used.count(axis) > 1:
            name = axis_names[axis] if axis_names else axis
            raise PlacementError(
                f"{what} {tuple(spec)!r} uses mesh axis {name!r} twice: an axis can shard only one dim of a tensor"
            )
    return axes


def _entry_axes(entry: object, ndim: int, names: Sequence[str] | None, spec: object, what: str) -> tuple[int, ...]:
    if entry is None:
        return ()
    parts = entry if isinstance(entry, (tuple, list)) else (entry,)
    if isinstance(entry, (tuple, list)) and len(entry) == 0:
        raise PlacementError(f"{what} {spec!r} has an empty entry: write None for a dim that is not sharded")
    axes = []
    for part in parts:
        if isinstance(part, (tuple, list)):
            raise PlacementError(
                f"{what} {spec!r} nests too deep at {part!r}: an entry is None, an axis, or a tuple of axes"
            )
        if isinstance(part, str):
            if not names or part not in names:
                have = (
                    f"the axes are {', '.join(map(repr, names))}"
                    if names
                    else "the mesh has no axis_names: use indices"
                )
                raise PlacementError(f"{what} {spec!r} names an unknown mesh axis {part!r}; {have}")
            axes.append(list(names).index(part))
        elif isinstance(part, bool) or not isinstance(part, int):
            raise PlacementError(
                f"{what} {spec!r} has the entry {part!r}: an entry is None, an axis, or a tuple of axes"
            )
        elif not 0 <= part < ndim:
            raise PlacementError(f"{what} {spec!r} uses mesh axis {part}, but the mesh has axes 0 to {ndim - 1}")
        else:
            axes.append(part)
    return tuple(axes)


def check_rank(spec: Sequence[object], tensor_ndim: int) -> None:
    """Raises `PlacementError` unless the spec has one entry for each of the `tensor_ndim` dims of a tensor."""
    if len(spec) != tensor_ndim:
        raise PlacementError(
            f"the partition spec {tuple(spec)!r} has {len(spec)} entries, the tensor has {tensor_ndim} dims: write one "
            "entry per dim, None for a dim that is not sharded"
        )


def axes_to_placements(axes: Axes, mesh_shape: Sequence[int]) -> tuple[Placement, ...]:
    """Placements, one per mesh dim, equivalent to `axes` (of `spec_axes`)."""
    placements: list[Placement] = [Replicate()] * len(mesh_shape)
    for dim, entry in enumerate(axes):
        for position, axis in enumerate(entry):
            factor = math.prod([mesh_shape[before] for before in entry[:position] if before > axis])
            placements[axis] = StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
    return tuple(placements)


def placements_to_axes(placements: Sequence[Placement], mesh_shape: Sequence[int], ndim: int) -> Axes:
    """Inverse of `axes_to_placements`; `ndim` is the number of dims of the tensor.

    Raises:
        PlacementError: a placement is partial (which no spec can express), there are more of them than mesh dims, a
            sharded dim does not exist, or no order of the axes has that split factor.
    """
    if len(placements) != len(mesh_shape):
        raise PlacementError(
            f"{len(placements)} placements {tuple(placements)} do not fit a mesh of {len(mesh_shape)} dims"
        )
    entries: list[list[int]] = [[] for _ in range(ndim)]
    for axis in reversed(range(len(mesh_shape))):
        placement = placements[axis]
        if isinstance(placement, Partial):
            raise PlacementError(
                f"{placement!r} over mesh dim {axis} has no partition spec: reduce it first (redistribute)"
            )
        if isinstance(placement, Replicate):
            continue
        dim = cast("Shard", placement).dim  # or one of a placement that shards in another order
        dim += ndim if dim < 0 else 0
        if not 0 <= dim < ndim:
            raise PlacementError(
                f"{placement!r} over mesh dim {axis} shards a dim that a tensor of {ndim} dims does not have"
            )
        factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        entries[dim].insert(_position(entries[dim], factor, mesh_shape, placements), axis)
    return tuple(map(tuple, entries))


def _position(entry: Sequence[int], factor: int, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> int:
    """Position in `entry` at which an axis with that split factor is inserted, before axes of `entry` that come later
    in the mesh.
    """
    for position in range(len(entry) + 1):
        if math.prod([mesh_shape[axis] for axis in entry[:position]]) == factor:
            return position
    raise PlacementError(
        f"no order of mesh axes corresponds to placements {tuple(placements)} on a mesh of shape {tuple(mesh_shape)}"
    )
