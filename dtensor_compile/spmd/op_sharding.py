"""Device-by-device meaning of a partition spec: tile assignment, groups of devices with equal data, and the shard of
each device.

The devices of a mesh, in the order of its axes, are transposed so that the axes of the spec come first, in the order in
which the spec names them, and other axes come last. Then

    tile_assignment      one dim per sharded tensor dim, followed by the axes that are not named
    replication_groups   one row per tile: the devices that hold it
    group_assignment     the indices of those rows, one dim per tensor dim (1 if it is not sharded)

`ShardingType` is REPLICATED if no dim is sharded, TILED if all dims are sharded and all axes are used, PARTIAL
otherwise, with the numbers of torch_xla. On a mesh with more axes than the tensor has dims an unsharded tensor is
PARTIAL too, as in torch_xla."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtensor_compile.errors import PlacementError
from dtensor_compile.spmd.partition_spec import Axes


class ShardingType(enum.IntEnum):
    """Kind of sharding of a tensor on a mesh; the values are torch_xla's."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


@dataclass(frozen=True)
class IotaTiles:
    """A tiling in XLA's compact ("V2") form: a permutation of positions in the mesh.

        numpy.arange(n).reshape(reshape_dims).transpose(transpose_perm).reshape(tile_assignment_dims)

    Attributes:
        tile_assignment_dims: pieces per tensor dim, followed by the number of copies if there are several.
        reshape_dims: shape of the mesh.
        transpose_perm: mesh axes in the order in which the spec names them, followed by the others.
        subgroup_types: ``[0]`` (replicated) if the last tile dim counts copies.
    """

    tile_assignment_dims: list[int]
    reshape_dims: list[int]
    transpose_perm: list[int]
    subgroup_types: list[int]


@dataclass(frozen=True)
class OpSharding:
    """Sharding of a tensor over the devices of a mesh, in XLA's terms.

    Attributes:
        tile_assignment, group_assignment, replication_groups: nested lists of device ids and of group numbers; see the
            module docstring. The latter two are empty if the type is not PARTIAL.
        sharding_type: see `ShardingType`.
        tile_dims: pieces per tensor dim.
        v2: the same as `IotaTiles`, in positions of the mesh's list of device ids; None if no dim is sharded.
    """

    tile_assignment: list[Any]
    group_assignment: list[Any]
    replication_groups: list[list[int]]
    sharding_type: ShardingType
    tile_dims: tuple[int, ...] = ()
    v2: IotaTiles | None = None

    def __str__(self) -> str:
        """Text of the sharding as in XLA: ``{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}``."""
        if self.sharding_type in (
            ShardingType.REPLICATED,
            ShardingType.MAXIMAL,
            ShardingType.MANUAL,
            ShardingType.UNKNOWN,
        ):
            return f"{{{self.sharding_type.name.lower()}}}"
        devices = np.asarray(self.replication_groups or self.tile_assignment)
        copies = devices.size // math.prod(self.tile_dims)
        if copies == devices.size:
            return "{replicated}"
        dims = [*self.tile_dims, copies] if copies > 1 else self.tile_dims
        rest = " last_tile_dim_replicate" if copies > 1 else ""
        return f"{{devices=[{','.join(map(str, dims))}]{','.join(map(str, devices.flatten()))}{rest}}}"


def op_sharding(device_ids: np.ndarray, axes: Axes) -> OpSharding:
    """The sharding of a tensor along `axes` (per tensor dim), with `device_ids` in the shape of the mesh."""
    shape = device_ids.shape
    used = [axis for entry in axes for axis in entry]
    unused = [axis for axis in range(device_ids.ndim) if axis not in used]
    tile_dims = tuple(math.prod(shape[axis] for axis in entry) for entry in axes)
    if device_ids.size == 1 or (not used and len(axes) >= device_ids.ndim):
        return OpSharding(device_ids.tolist(), [], [], ShardingType.REPLICATED, tile_dims)
    copies = math.prod(shape[axis] for axis in unused)
    last = [copies] if copies > 1 else []
    v2 = IotaTiles([*tile_dims, *last], list(shape), used + unused, [0] * len(last)) if used else None
    ordered = device_ids.transpose(used + unused)
    cut = [size for size, entry in zip(tile_dims, axes) if entry]
    tiles = ordered.reshape(cut + [shape[axis] for axis in unused]).tolist()
    if not unused and all(axes):
        return OpSharding(tiles, [], [], ShardingType.TILED, tile_dims, v2)
    groups = ordered.reshape(math.prod(tile_dims), -1)
    numbers = np.arange(len(groups)).reshape(tile_dims).tolist() if axes else []
    return OpSharding(tiles, numbers, groups.tolist(), ShardingType.PARTIAL, tile_dims, v2)


@dataclass(frozen=True)
class DeviceShard:
    """The shard of one device: ``[begin, end)`` of each tensor dim, and its index among the copies of that shard."""

    device: int
    index: tuple[tuple[int, int], ...]
    replica: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.index)


def device_shards(device_ids: np.ndarray, axes: Axes, shape: Sequence[int]) -> list[DeviceShard]:
    """The shard of every device, in order of id. Pieces have ``ceil(size / pieces)`` elements, the last ones fewer or
    none; if several axes shard a dim, each splits the pieces of the one before it (as DTensor does)."""
    copies: dict[tuple[int, ...], int] = {}
    shards = {}
    for coordinate in np.ndindex(*device_ids.shape):
        index = tuple(
            _range(size, [(device_ids.shape[a], coordinate[a]) for a in entry]) for size, entry in zip(shape, axes)
        )
        tile = tuple(coordinate[axis] for entry in axes for axis in entry)
        copies[tile] = copies.get(tile, -1) + 1
        shards[int(device_ids[coordinate])] = DeviceShard(int(device_ids[coordinate]), index, copies[tile])
    return [shards[device] for device in sorted(shards)]


def _range(size: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    begin, end = 0, size
    for pieces, piece in cuts:
        step = -(-(end - begin) // pieces)
        begin, end = min(begin + piece * step, end), min(begin + (piece + 1) * step, end)
    return begin, end


_TILES = re.compile(r"\{devices=\[(?P<dims>[0-9,]+)\](?P<devices>[0-9,]+)(?P<rest> last_tile_dim_replicate)?\}")


def grid_of(text: str) -> list[Any]:
    """The devices of a sharding in XLA's text, as nested lists in the shape of its tiles.

    Raises:
        PlacementError: the text is not of the form ``{devices=[2,4]0,1,...}``.
    """
    match = _TILES.fullmatch(text)
    dims, devices = (list(map(int, match[name].split(","))) if match else [] for name in ("dims", "devices"))
    if match is None or math.prod(dims) != len(devices):
        raise PlacementError(f"{text!r} is not a sharding in tiles; one looks like '{{devices=[2,2]0,1,2,3}}'")
    return np.array(devices).reshape(dims).tolist()
