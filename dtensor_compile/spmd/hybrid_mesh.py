"""`HybridMesh`: a mesh whose axes use a fast network inside of a granule and a slow one between granules.

A granule is a group of devices connected by the fast network: a host, an NVLink domain, a slice of a torus. Each axis i
of the mesh has ``dcn_mesh_shape[i] * ici_mesh_shape[i]`` devices: the outer part counts granules, the inner part
devices within one. If the devices of a granule have coordinates, mesh axes are mapped to torus axes (`topology.torus`);
otherwise all devices are equally near, and are taken in order. Granules are ordered by their number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from dtensor_compile.errors import MeshError
from dtensor_compile.spmd.logical_mesh import Mesh
from dtensor_compile.topology.devices import hosts_from_environment
from dtensor_compile.topology.links import CLUSTERS, Cluster, seconds_over
from dtensor_compile.topology.torus import Assignment, assign_axes, lay_out

_TORUS_AXES = ("x", "y", "z", "core")


class HybridMesh(Mesh):
    """A mesh over granules of devices; see the module docstring.

    Args:
        ici_mesh_shape: sizes of the axes inside of a granule; their product is the number of its devices.
        dcn_mesh_shape: sizes of the axes between granules; None if there is one granule.
        axis_names: names of the axes.
        device_attributes: one mapping per device with ``name`` (its number, or text that ends in it, as ``"TPU:3"``),
            ``slice_index`` (its granule; default 0), and for a torus ``coords`` and ``core_on_chip``.
            None reads hosts from the launcher's environment (`topology.devices`, which also finds NVLink domains); all
            ranks have to call then.
        allow_split_physical_axes: whether two mesh axes may share one torus axis.
        cluster: the cluster whose links the table of `explain` uses.

    Raises:
        MeshError: the shapes do not fit each other or the devices, granules differ, coordinates are missing or
            duplicated.
    """

    def __init__(
        self,
        *,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        device_attributes: Sequence[Mapping[str, Any]] | None = None,
        allow_split_physical_axes: bool = False,
        cluster: str = "h100",
    ) -> None:
        self.ici_mesh_shape = tuple(ici_mesh_shape)
        self.dcn_mesh_shape = tuple(dcn_mesh_shape) if dcn_mesh_shape is not None else (1,) * len(self.ici_mesh_shape)
        if len(self.ici_mesh_shape) != len(self.dcn_mesh_shape):
            raise MeshError(
                f"ici_mesh_shape {self.ici_mesh_shape} and dcn_mesh_shape {self.dcn_mesh_shape} differ in length"
            )
        if cluster not in CLUSTERS:
            raise MeshError(f"unknown cluster {cluster!r}; known clusters: {', '.join(CLUSTERS)}")
        self._cluster: Cluster = CLUSTERS[cluster]
        self._torus: tuple[int, ...] = ()
        self._assignment: Assignment = ()
        granules = _granules(hosts_from_environment() if device_attributes is None else device_attributes)
        if math.prod(self.dcn_mesh_shape) != len(granules):
            raise MeshError(
                f"dcn_mesh_shape {self.dcn_mesh_shape} counts {math.prod(self.dcn_mesh_shape)} granules, there are "
                f"{len(granules)}"
            )
        inside = [self._inside(granule, allow_split_physical_axes) for granule in granules]
        grid = np.stack(inside).reshape(self.dcn_mesh_shape + self.ici_mesh_shape)
        n = len(self.ici_mesh_shape)
        shape = tuple(outer * inner for outer, inner in zip(self.dcn_mesh_shape, self.ici_mesh_shape))
        grid = grid.transpose([axis for i in range(n) for axis in (i, n + i)])
        super().__init__(grid.flatten().tolist(), shape, axis_names)

    def _inside(self, granule: Sequence[Mapping[str, Any]], split: bool) -> np.ndarray:
        if math.prod(self.ici_mesh_shape) != len(granule):
            want = math.prod(self.ici_mesh_shape)
            raise MeshError(f"ici_mesh_shape {self.ici_mesh_shape} has {want} devices, a granule has {len(granule)}")
        if not any("coords" in device for device in granule):
            return np.array(sorted(map(_number, granule))).reshape(self.ici_mesh_shape)
        devices = _physical(granule)
        self._torus = devices.shape
        self._assignment = assign_axes(devices.shape, self.ici_mesh_shape, split)
        return lay_out(devices, self._assignment)

    def explain(self, size: int = 64 << 20) -> Table:
        """A ``rich`` table of the links that each axis uses, and the time of an all-reduce of `size` bytes along it.

        Two levels, one after the other, as in libraries: reduce-scatter and all-gather inside of a granule, an
        all-reduce of the shards between granules. Seconds are those of `topology.links`, for the cluster's links."""
        table = Table("mesh axis", "size", "inside", "over", "between", "all-reduce", title=f"{self!r}, {size:,} bytes")
        for axis, (name, length) in enumerate(self.shape().items()):
            inner, outer = self.ici_mesh_shape[axis], self.dcn_mesh_shape[axis]
            seconds = self.all_reduce_seconds(axis, size)
            over = self._over(axis) if inner > 1 else "-"
            table.add_row(str(name), str(length), str(inner), over, str(outer), f"{seconds * 1e6:,.1f} us")
        return table

    def all_reduce_seconds(self, axis: int, size: int) -> float:
        """Seconds of an all-reduce of `size` bytes along an axis; see `explain`."""
        inner, outer = self.ici_mesh_shape[axis], self.dcn_mesh_shape[axis]
        seconds = 0.0
        between = self._cluster.between.of_group(outer, 1, self._cluster.inside)
        for n, link, part in ((inner, self._cluster.inside, size), (outer, between, size / inner)):
            seconds += seconds_over(link, self._cluster.backend, "all_reduce", 2 * part * (n - 1) / n, n)
        return seconds

    def _over(self, axis: int) -> str:
        if not self._assignment:
            return "the links inside of a granule"
        parts = [
            f"{name} ({part})" if part == size else f"{name} ({part} of {size})"
            for name, part, size in zip(_TORUS_AXES, self._assignment[axis], self._torus)
            if part > 1
        ]
        return ", ".join(parts)


def _number(device: Mapping[str, Any]) -> int:
    match = re.search(r"(\d+)$", str(device.get("name", "")))
    if match is None:
        raise MeshError(f"the name of a device must end in its number, as in 'TPU:3': {dict(device)}")
    return int(match[1])


def _granules(devices: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    if not devices:
        raise MeshError("device_attributes is empty: a mesh needs devices")
    granules: dict[int, list[Mapping[str, Any]]] = {}
    for device in devices:
        granules.setdefault(int(device.get("slice_index", 0)), []).append(device)
    sizes = {index: len(granule) for index, granule in sorted(granules.items())}
    if len(set(sizes.values())) > 1:
        raise MeshError(f"granules must have equal sizes; devices by granule: {sizes}")
    return [granules[index] for index in sizes]


def _physical(granule: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Device numbers in the shape of the torus that their coordinates span: x, y, z, core."""
    missing = [device for device in granule if "coords" not in device]
    if missing:
        raise MeshError(f"some devices of a granule have coords and others do not: {dict(missing[0])}")
    places: dict[tuple[int, ...], int] = {}
    for device in granule:
        place = (*(int(c) for c in device["coords"]), int(device.get("core_on_chip", 0)))
        if place in places:
            raise MeshError(f"devices {places[place]} and {_number(device)} have the same coordinates {place}")
        places[place] = _number(device)
    if len({len(place) for place in places}) > 1:
        raise MeshError(f"coords differ in length: {sorted(places)}")
    low = [min(axis) for axis in zip(*places)]
    shape = [max(axis) - start + 1 for axis, start in zip(zip(*places), low)]
    if math.prod(shape) != len(places):
        raise MeshError(f"{len(places)} devices do not fill the torus of shape {tuple(shape)} that their coords span")
    devices = np.empty(shape, dtype=int)
    for place, number in places.items():
        devices[tuple(c - start for c, start in zip(place, low))] = number
    return devices
