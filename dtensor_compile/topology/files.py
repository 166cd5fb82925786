"""Topologies and GPUs in files: reads TOML or JSON, writes JSON. Files are written by hand or by a measurement.

    name = "two racks"
    ranks_per_host = 8                     # 0: all ranks on one host
    backend = "nccl"                       # optional
    inside = "nvlink4"                     # a preset by name, or a table
    [between]
    latency = 8e-6                         # seconds to start a message
    bandwidth = 50e9                       # bytes per second
    shared = false                         # optional: whether the ranks of a host send over it together
    collectives.all_gather.8 = [[1e3, 1e7], ...]  # optional: measured on 8 ranks, bytes that one sends, and per second
    collectives.all_gather."16/2" = [...]  # optional: on 16 ranks of two whole hosts
    [mesh_dims.tp]                         # optional: the link along a mesh dim, by its name
    latency = 4e-6
    bandwidth = 400e9
    [device]                               # optional: that of the h100 preset where left out
    memory = 3.35e12                       # bytes per second
    launch = 4e-6                          # seconds
    peak = {2 = 989e12, 4 = 494e12}        # operations per second, by bytes of an element
    exact = 67e12                          # optional: those of float32 matmuls without TF32
    contention = 0.19                      # optional: seconds of compute lost for a second of communication beside it
    [device.achieved]                      # optional: what it achieves, as tools/measure_device.py writes it
    basis = "measured on ..."              # optional, for reports; quality = "guess" where it is one
    memory = [[8192, 6.8e9], ...]          # bytes read and written, and bytes per second
    matmul.bfloat16 = [[5e5, 2.4e11], ...] # operations, and operations per second; also tf32 and float32
    attention.bfloat16 = [...]             # optional: causal attention, and attention_backward

A GPU, for `dtensor_compile.offline.device`:

    name = "L40S"
    capability = "8.9"
    multiprocessors = 142
    bytes = 48_000_000_000                 # of its memory
    shared_memory = 101_376                # bytes that a thread block may have
    l2 = 100_663_296                       # bytes of the level 2 cache
    registers = 65_536                     # optional: of a multiprocessor
    threads = 1536                         # optional: resident ones of a multiprocessor
    [device]                               # optional, as above
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import os
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from dtensor_compile.errors import TopologyError
from dtensor_compile.topology.gpus import GPUS, Device, Gpu
from dtensor_compile.topology.links import CLUSTERS, LINKS, Cluster, Link
from dtensor_compile.topology.published_rates import Measured
from dtensor_compile.topology.rates import QUALITIES, Achieved, Curve

#: Kinds of collectives that can be measured.
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_KEYS = {"name", "ranks_per_host", "inside", "between", "mesh_dims", "backend", "device"}


def topology(name: str | os.PathLike[str]) -> Cluster:
    """The preset of that name, or the topology in the file of that path.

    Raises:
        TopologyError: neither exists, or the file does not describe a topology.
    """
    found = _preset_or_file(name, CLUSTERS, "topology")
    return found if isinstance(found, Cluster) else from_values(*found)


def find_gpu(name: str | os.PathLike[str]) -> Gpu:
    """The preset of that name, or the GPU in the file of that path.

    Raises:
        TopologyError: neither exists, or the file does not describe a GPU.
    """
    found = _preset_or_file(name, GPUS, "GPU")
    return found if isinstance(found, Gpu) else _gpu(*found)


def _preset_or_file(name: str | os.PathLike[str], presets: Mapping[str, Any], kind: str) -> Any:
    """A preset, or the values in a file and its path."""
    text = os.fspath(name)
    if text in presets:
        return presets[text]
    path = pathlib.Path(text)
    if path.is_file():
        return _load(str(path.resolve()), path.stat().st_mtime_ns, kind), str(path.resolve())
    near = difflib.get_close_matches(text, presets, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise TopologyError(f"{kind} {text!r} is neither a file nor a preset; {hint}presets: {', '.join(presets)}")


@functools.lru_cache(maxsize=64)
def _load(path: str, changed: int, kind: str) -> Any:
    file = pathlib.Path(path)
    try:
        return json.loads(file.read_text()) if file.suffix == ".json" else tomllib.loads(file.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise TopologyError(f"{kind} {path} does not parse: {error}") from error


def from_values(values: Mapping[str, Any], where: str = "topology") -> Cluster:
    """The topology that plain values, as in a file, describe.

    Raises:
        TopologyError: a key is unknown or missing, or a value is not a number above zero.
    """
    if not isinstance(values, Mapping) or not {"inside", "between"} <= values.keys() <= _KEYS:
        given = ", ".join(values) if isinstance(values, Mapping) else type(values).__name__
        raise TopologyError(
            f"{where}: keys are {', '.join(sorted(_KEYS))}, of which inside and between are needed; given: {given}"
        )
    ranks = values.get("ranks_per_host", 0)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 0:
        raise TopologyError(f"{where}: ranks_per_host is a number of ranks, 0 for all of them, not {ranks!r}")
    dims = values.get("mesh_dims", {})
    if not isinstance(dims, Mapping):
        raise TopologyError(f"{where}: mesh_dims is a table of links by the names of mesh dims, not {dims!r}")
    return Cluster(
        str(values.get("name", pathlib.Path(where).stem)),
        ranks,
        _link(values["inside"], f"{where}: inside"),
        _link(values["between"], f"{where}: between"),
        _device(values.get("device"), f"{where}: device"),
        {str(name): _link(link, f"{where}: mesh_dims.{name}") for name, link in dims.items()},
        str(values.get("backend", "")),
    )


def _link(value: Any, where: str) -> Link:
    if isinstance(value, str):
        if value not in LINKS:
            raise TopologyError(f"{where}: no link is called {value!r}; presets: {', '.join(LINKS)}")
        return LINKS[value]
    needed, optional = {"latency", "bandwidth"}, {"shared", "collectives"}
    if not isinstance(value, Mapping) or not needed <= value.keys() <= needed | optional:
        keys = "latency (seconds), bandwidth (bytes per second); optional: shared and collectives"
        raise TopologyError(f"{where}: a link is {keys}, not {value!r}")
    shared = value.get("shared", False)
    if not isinstance(shared, bool):
        raise TopologyError(f"{where}.shared is true or false, not {shared!r}")
    return Link(
        _number(value["latency"], f"{where}.latency", zero=True),
        _number(value["bandwidth"], f"{where}.bandwidth"),
        shared,
        tuple(_collectives(value.get("collectives", {}), f"{where}.collectives")),
    )


def _collectives(value: Any, where: str) -> Iterator[Measured]:
    if not isinstance(value, Mapping) or not all(isinstance(known, Mapping) for known in value.values()):
        raise TopologyError(f"{where} is a table by kind and number of ranks, not {value!r}")
    for kind, known in value.items():
        if kind not in KINDS:
            raise TopologyError(f"{where}: no collective is called {kind!r}; kinds: {', '.join(KINDS)}")
        for ranks, points in known.items():
            found = re.fullmatch(r"(\d+)(?:/(\d+))?", str(ranks))
            number, hosts = (int(found[1]), int(found[2] or 0)) if found else (0, 0)
            if number < 2 or hosts and number % hosts or found and found[2] == "0":
                raise TopologyError(f"{where}.{kind}: {ranks!r} is no number of ranks, nor one of ranks/hosts")
            yield Measured(kind, number, _curve(points, f"{where}.{kind}.{ranks}"), hosts)


_DEVICE_KEYS, _DEVICE_OPTIONAL = {"peak", "memory", "launch"}, {"exact", "achieved", "contention"}


def _device(value: Any, where: str) -> Device:
    if value is None:
        return CLUSTERS["h100"].device
    if (
        not isinstance(value, Mapping)
        or not _DEVICE_KEYS <= value.keys() <= _DEVICE_KEYS | _DEVICE_OPTIONAL
        or not isinstance(value["peak"], Mapping)
    ):
        keys = (
            "peak (operations per second by bytes of an element), memory and launch; optional: exact, achieved and "
            "contention"
        )
        raise TopologyError(f"{where}: a device is {keys}, not {value!r}")
    try:
        peak = tuple(sorted((int(size), _number(rate, f"{where}.peak")) for size, rate in value["peak"].items()))
    except ValueError as error:
        raise TopologyError(f"{where}.peak: {error}") from error
    if not peak:
        raise TopologyError(f"{where}.peak is empty")
    memory, launch = _number(value["memory"], f"{where}.memory"), _number(value["launch"], f"{where}.launch", zero=True)
    exact = _number(value["exact"], f"{where}.exact") if "exact" in value else None
    achieved = _achieved(value["achieved"], f"{where}.achieved") if "achieved" in value else None
    contention = _number(value["contention"], f"{where}.contention", zero=True) if "contention" in value else 0.0
    if contention >= 1.0:
        raise TopologyError(f"{where}.contention is {contention:g}: compute goes on beside communication only below 1")
    return Device(peak, memory, launch, exact, achieved, contention)


_BY_DTYPE, _DTYPES = ("matmul", "attention", "attention_backward"), {"bfloat16", "tf32", "float32"}


def _achieved(value: Any, where: str) -> Achieved:
    if not isinstance(value, Mapping) or not {"memory", "matmul"} <= value.keys() <= {
        *_BY_DTYPE,
        "memory",
        "basis",
        "quality",
    }:
        keys = f"memory and matmul; optional: {', '.join(_BY_DTYPE[1:])}, basis and quality"
        raise TopologyError(f"{where} has the keys {keys}, not {value!r}")
    tables: dict[str, dict[str, Curve]] = {}
    for name in _BY_DTYPE:
        given = value.get(name, {})
        if not isinstance(given, Mapping) or not given.keys() <= _DTYPES:
            raise TopologyError(f"{where}.{name} is a table by dtype ({', '.join(sorted(_DTYPES))}), not {given!r}")
        tables[name] = {dtype: _curve(points, f"{where}.{name}.{dtype}") for dtype, points in given.items()}
    memory = _curve(value["memory"], f"{where}.memory")
    basis, quality = str(value.get("basis", f"rates of {where}")), str(value.get("quality", "measured"))
    if quality not in QUALITIES:
        raise TopologyError(f"{where}.quality is {' or '.join(QUALITIES)}, not {quality!r}")
    return Achieved(memory=memory, basis=basis, quality=quality, **tables)


def _curve(value: Any, where: str) -> Curve:
    if not isinstance(value, list) or not value or not all(isinstance(at, list) and len(at) == 2 for at in value):
        raise TopologyError(f"{where} is a list of pairs, a size and a rate, not {value!r}")
    points = tuple((_number(size, where), _number(rate, where)) for size, rate in value)
    if any(before[0] >= after[0] for before, after in itertools.pairwise(points)):
        raise TopologyError(f"{where}: sizes grow from pair to pair, not {value!r}")
    return Curve(points)


_GPU_KEYS = {"capability", "multiprocessors", "bytes", "shared_memory", "l2"}
_GPU_OPTIONAL = {"name", "registers", "threads", "device"}


def _gpu(values: Any, where: str) -> Gpu:
    if not isinstance(values, Mapping) or not _GPU_KEYS <= values.keys() <= _GPU_KEYS | _GPU_OPTIONAL:
        given = ", ".join(values) if isinstance(values, Mapping) else type(values).__name__
        raise TopologyError(
            f"{where}: keys of a GPU are {', '.join(sorted(_GPU_KEYS))}, and if need be "
            f"{', '.join(sorted(_GPU_OPTIONAL))}; given: {given}"
        )
    capability = re.fullmatch(r"(\d+)\.(\d)", str(values["capability"]))
    if capability is None:
        raise TopologyError(f'{where}: capability is a compute capability such as "9.0", not {values["capability"]!r}')
    sizes = {
        key: _number(values[key], f"{where}: {key}")
        for key in (*_GPU_KEYS - {"capability"}, "registers", "threads")
        if key in values
    }
    for key, size in sizes.items():
        if size != int(size):
            raise TopologyError(f"{where}: {key} is a whole number, not {values[key]!r}")
    return Gpu(
        name=str(values.get("name", pathlib.Path(where).stem)),
        capability=(int(capability[1]), int(capability[2])),
        device=_device(values.get("device"), f"{where}: device"),
        **{key: int(size) for key, size in sizes.items()},
    )


def _number(value: Any, where: str, *, zero: bool = False) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (value > 0 or zero and value == 0) or value == float("inf"):
        raise TopologyError(f"{where} is a number {'not below' if zero else 'above'} zero, not {value!r}")
    return float(value)


def to_values(cluster: Cluster) -> dict[str, Any]:
    """Plain values that `from_values` reads back."""

    def link(value: Link) -> dict[str, Any]:
        known: dict[str, dict[str, Any]] = {}
        for this in value.collectives:
            ranks = f"{this.ranks}/{this.hosts}" if this.hosts else str(this.ranks)
            known.setdefault(this.kind, {})[ranks] = [list(point) for point in this.rates.points]
        measured = {"collectives": known} if known else {}
        return {"latency": value.latency, "bandwidth": value.bandwidth, "shared": value.shared, **measured}

    return {
        "name": cluster.name,
        "ranks_per_host": cluster.ranks_per_host,
        "backend": cluster.backend,
        "inside": link(cluster.inside),
        "between": link(cluster.between),
        "mesh_dims": {name: link(value) for name, value in cluster.mesh_dims.items()},
        "device": device_values(cluster.device),
    }


def device_values(device: Device) -> dict[str, Any]:
    """Plain values of a device, as a file has them."""
    found: dict[str, Any] = {
        "peak": {str(size): rate for size, rate in device.peak},
        "memory": device.memory,
        "launch": device.launch,
    }
    if device.exact is not None:
        found["exact"] = device.exact
    if device.contention:
        found["contention"] = device.contention
    if (this := device.achieved) is not None:
        found["achieved"] = {
            "basis": this.basis,
            "quality": this.quality,
            "memory": [list(point) for point in this.memory.points],
            **{
                name: {dtype: [list(point) for point in known.points] for dtype, known in getattr(this, name).items()}
                for name in _BY_DTYPE
            },
        }
    return found


def save_topology(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Writes a topology as JSON; `topology` reads it back.

    Raises:
        TopologyError: the name does not end in ``.json``.
    """
    if pathlib.Path(path).suffix != ".json":
        raise TopologyError(f"topologies are written as JSON: call the file {pathlib.Path(path).with_suffix('.json')}")
    pathlib.Path(path).write_text(json.dumps(to_values(cluster), indent=2) + "\n")
