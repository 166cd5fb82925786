"""Graphs and kernels that were compiled in advance, for ranks that compile nothing themselves: ``options={"artifacts":
FOLDER}``, written by ``dtensor-compile build``.

    manifest.json   what the folder was built for, and by program which ranks have the same graphs
    caches-0.tar    Inductor's caches of rank 0, which stands for these ranks

Graphs are rank-free then (`ir/rank_free.py`). The build lowers each program on every simulated rank: ranks whose graphs
are the same to the last character share the caches of the first of them. torch finds a program in its own caches, under
a key with the first rank in place of this one. A program that was not built, or was changed since, is therefore not
found, and is compiled as usual.

Cached graphs are code: load only folders that you trust as you trust the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import pathlib
import platform
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_compile.compat import pytree
from dtensor_compile.compat.distributed.device_meshes import group_exists, group_ranks, real_mesh
from dtensor_compile.compat.dynamo.trackers.tracker_tools import real_object
from dtensor_compile.compat.inductor.cache_folder import cache_folder
from dtensor_compile.compat.inductor.compile import package_digest
from dtensor_compile.compat.inductor.start_costs import processor
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import texts_in
from dtensor_compile.graph.inline_subgraph import nodes_with_blocks
from dtensor_compile.ir.known_groups import know_group
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.ir.rank_free import dims_of_name

log = logging.getLogger("dtensor_compile")

MANIFEST = "manifest.json"
FORMAT = 1


class ArtifactsError(Exception):
    """Artifacts cannot be used, for the reason in the message; programs are compiled as usual."""


#: Process groups by name, with their global ranks in group order.
Groups = dict[str, list[int]]


@dataclass
class Build:
    """A build in progress in this process.

    Attributes:
        kernels: whether programs are compiled; if not, they are only lowered, and run operator by operator.
        graphs: the texts of the lowered graphs of each program, by its digest.
        groups: the process groups over which they communicate, by name, with their ranks.
    """

    kernels: bool
    graphs: dict[str, list[str]] = field(default_factory=dict)
    groups: dict[str, Groups] = field(default_factory=dict)

    def lowered(self, digest: str, graph: torch.fx.Graph) -> None:
        """Notes a lowered graph of a program."""
        assert graph.owning_module is not None
        self.graphs.setdefault(digest, []).append(_text(graph.owning_module, "val"))
        names = {name for name in texts_in(nodes_with_blocks(graph)) if group_exists(name)}
        self.groups.setdefault(digest, {}).update({name: group_ranks(name) for name in names})


_builds: list[Build] = []


@contextlib.contextmanager
def building(build: Build) -> Iterator[None]:
    """While active, programs that are compiled with the option ``artifacts`` are part of `build`."""
    _builds.append(build)
    try:
        yield
    finally:
        _builds.remove(build)


def current_build() -> Build | None:
    """The build in progress."""
    return _builds[-1] if _builds else None


# ---- digests -------------------------------------------------------------------------------------------------------

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

#: What a program may differ in, for messages.
_OPTIONS, _INPUTS, _CODE = "options", "shapes, placements or meshes of its inputs", "code"


def program_digest(gm: torch.fx.GraphModule, inputs: Sequence[Any], options: tuple[Any, ...]) -> str:
    """Digests of everything that determines the lowered graphs of a program, the same in every process and on every
    rank with the same local shapes: of its options, its inputs and its code, with dots in between.

    Args:
        gm, inputs: a Dynamo graph with its subgraphs, and its fake inputs.
        options: the cache key of the options.
    """
    parts = (repr(options), repr([_about(value) for value in inputs]), _text(gm, "example_value"))
    return ".".join(hashlib.sha256(part.encode()).hexdigest()[:32] for part in parts)


def _text(gm: torch.fx.GraphModule, values: str) -> str:
    """A graph and its subgraphs, with dtypes, shapes and strides of values, and contents of the tensors that they hold.

    Args:
        values: the key of ``meta`` under which nodes have their fake values.
    """
    parts: list[str] = []
    for name, module in gm.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            abouts = [_about(node.meta.get(values)) for node in module.graph.nodes]
            held = [_content(_held(module, str(node.target))) for node in module.graph.find_nodes(op="get_attr")]
            parts += [name, _ADDRESS.sub("", str(module.graph)), repr(abouts), repr(held)]
    return "\n".join(parts)


def _held(module: torch.nn.Module, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), module)


def _content(value: Any) -> Any:
    """Digest of the bytes of a tensor on a CPU, which may differ between ranks whose graphs have the same text."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "cpu":
        return _about(value)
    memory = value.untyped_storage()  # not read by an operator, which would be traced
    content = ctypes.string_at(memory.data_ptr(), memory.nbytes()) if memory.nbytes() else b""
    return (_about(value), value.storage_offset(), hashlib.sha256(content).hexdigest())


def _other_parts(digest: str, known: Iterable[str]) -> str:
    """The differences of a program from the most similar known one."""
    names = (_OPTIONS, _INPUTS, _CODE)
    others: list[list[str]] = [
        [name for name, mine, theirs in zip(names, digest.split("."), other.split(".")) if mine != theirs]
        for other in known
    ]
    fewest: list[str] = min(others, key=len, default=[])
    return " and ".join(fewest)


def _about(value: Any) -> Any:
    """The properties of a value that matter to a compiler."""
    leaves = pytree.tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return [_about(leaf) for leaf in leaves]
    if isinstance(value, DTensor):
        placed = (str(value.placements), mesh_text(real_mesh(value.device_mesh)))
        return (str(tuple(value.shape)), str(value.stride()), *placed, _about(value._local_tensor))
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return (str(value.dtype), str(value.device.type), str(tuple(value.shape)), str(strides), value.requires_grad)
    if isinstance(mesh := real_object(value), DeviceMesh):
        return mesh_text(mesh)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (str(value), str(value.node.hint))
    return type(value).__name__


# ---- the folder ----------------------------------------------------------------------------------------------------


def made_for(world: int) -> dict[str, Any]:
    """The environment of this process; artifacts are used only where all of it is equal."""
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "dtensor_compile": package_digest()[:16],
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": processor(),
        "CPU threads": torch.get_num_threads(),
        "ranks": world,
    }


def write(
    folder: pathlib.Path,
    world: int,
    shared: Mapping[str, Mapping[int, int]],
    groups: Mapping[str, Mapping[int, Groups]],
    caches: Mapping[int, pathlib.Path],
) -> None:
    """Writes a folder of artifacts.

    Args:
        world: number of ranks of the job.
        shared: by the digest of a program, for each rank the rank whose graphs it shares.
        groups: by the digest of a program and these ranks, the process groups over which they communicate.
        caches: Inductor's cache folder of each of these ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for rank, cache in caches.items():
        path = folder / f"caches-{rank}.tar"
        with tarfile.open(path, "w") as archive:
            for entry in sorted(cache.rglob("*")):
                if entry.is_file():
                    archive.add(entry, str(entry.relative_to(cache)))
        files[str(rank)] = {"name": path.name, "sha256": _digest_of(path)}
    programs = {
        digest: {
            "ranks": {str(rank): first for rank, first in firsts.items()},
            "groups": {str(first): groups[digest][first] for first in set(firsts.values())},
        }
        for digest, firsts in shared.items()
    }
    manifest = {"made_for": made_for(world), "programs": programs, "caches": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _digest_of(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Artifacts:
    """A folder of artifacts that fit this process.

    Attributes:
        folder: its path.
        programs: by the digest of a program: ``"ranks"``, for each rank the rank whose graphs it shares, and
            ``"groups"``, the process groups over which that rank communicates.
        caches: by rank, name and digest of the archive of its caches.
    """

    folder: pathlib.Path
    programs: Mapping[str, Mapping[str, Any]]
    caches: Mapping[str, Mapping[str, str]]

    def rank_of(self, digest: str, rank: int) -> int:
        """The rank whose graphs of a program `rank` shares; its caches are in Inductor's cache folder then.

        Raises:
            ArtifactsError: there are none, or they cannot be read or written.
        """
        program = self.programs.get(digest)
        if program is None or str(rank) not in program["ranks"]:
            differs = _other_parts(digest, self.programs) or "rank"
            raise ArtifactsError(f"it is not among the programs that were built; the most similar has other {differs}")
        first: int = program["ranks"][str(rank)]
        for name, ranks in program["groups"][str(first)].items():
            if dims_of_name(name) is not None:
                know_group(name)
            elif not group_exists(name) or group_ranks(name) != ranks:
                raise ArtifactsError(f"the process group {name} was that of the ranks {', '.join(map(str, ranks))}")
        _unpack(str(self.folder), first, self.caches[str(first)]["name"], self.caches[str(first)]["sha256"])
        return first


@functools.cache
def _read(folder: str, world: int) -> Artifacts | str:
    """The artifacts in a folder, or the reason why they cannot be used."""
    try:
        manifest = json.loads((pathlib.Path(folder) / MANIFEST).read_text())
        found, programs, caches = manifest["made_for"], manifest["programs"], manifest["caches"]
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror or error}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is damaged: {type(error).__name__}: {error}"
    here = made_for(world)
    other = [f"{key} {found.get(key)}, here {here[key]}" for key in here if found.get(key) != here[key]]
    return f"it was built for {'; '.join(other)}" if other else Artifacts(pathlib.Path(folder), programs, caches)


@functools.cache
def _unpacked(folder: str, first: int, name: str, sha256: str, into: str) -> str:
    """Writes the files of an archive that are missing into the cache folder; returns an error message, or an empty
    text."""
    path = pathlib.Path(folder) / name
    try:
        if _digest_of(path) != sha256:
            return f"{name} is damaged: its SHA-256 is not that in {MANIFEST}"
        with tarfile.open(path) as archive:
            for member in archive:
                _write_file(archive, member, pathlib.Path(into))
    except (OSError, tarfile.TarError) as error:
        return f"{name} cannot be unpacked into {into}: {type(error).__name__}: {error}"
    return ""


def _unpack(folder: str, first: int, name: str, sha256: str) -> None:
    try:
        into = cache_folder()
    except OSError as error:
        raise ArtifactsError(f"Inductor's cache folder cannot be made: {error}") from error
    if wrong := _unpacked(folder, first, name, sha256, into):
        raise ArtifactsError(wrong)


def _write_file(archive: tarfile.TarFile, member: tarfile.TarInfo, into: pathlib.Path) -> None:
    target = (into / member.name).resolve()
    if not member.isfile() or into.resolve() not in target.parents:
        raise tarfile.TarError(f"{member.name} is no file of a cache")
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    content = archive.extractfile(member)
    assert content is not None
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:  # other ranks write the same file
        file.write(content.read())
    os.chmod(file.name, member.mode)
    os.replace(file.name, target)


# ---- use -----------------------------------------------------------------------------------------------------------


def shared_rank(folder: str, digest: str) -> int:
    """The rank that replaces this one in the cache key of a program.

    Raises:
        ArtifactsError: the artifacts do not have the program, or do not fit.
    """
    if current_build() is not None:
        return dist.get_rank()
    found = _read(os.path.abspath(folder), dist.get_world_size())
    if isinstance(found, str):
        raise ArtifactsError(found)
    return found.rank_of(digest, dist.get_rank())


def not_used(folder: str, function: str, error: ArtifactsError) -> Decision:
    """Warns, once for each reason, that a program is compiled although there are artifacts; returns a decision."""
    reason = f"artifacts in {folder} are not used for {function or 'a program'}: {error}; it is compiled"
    if reason not in _reported:
        _reported.add(reason)
        log.warning("%s", reason)
    return Decision("artifacts", "", reason, folder, "compiled", left_alone=True)


_reported: set[str] = set()
