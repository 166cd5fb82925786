"""The text form of a mesh, and coordinates and groups derived from it in plain integers.

    cpu[dp=2:2,tp=2:1]@4        2x2 over ranks 0..3: dp has size 2 and stride 2, tp size 2 and stride 1
    cpu[tp=2:1]@4               the tp dim of that mesh: the same text on every rank
    cpu[dp_tp=2:2*2:1]@4        two dims flattened into one
    cpu[2:1]@3.1                a mesh without dim names over ranks 3 and 1

Strides index the list of ranks after ``@`` (one number n means 0..n-1). A rank finds its own coordinate and its own
groups from the text and its rank alone, so the text of a slice of a mesh does not differ between ranks, and neither
does a graph that carries it.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.dynamo.trackers.tracker_tools import fact_guard
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import NoProcessGroupError, SpecTextError
from dtensor_compile.ir.rank_free import is_rank_free, name_on_all_ranks
from dtensor_compile.store.rendezvous import all_arrive

_TEXT = re.compile(r"(?P<device>\w+)\[(?P<dims>[^\]]*)\]@(?P<ranks>[0-9]+(\.[0-9]+)*\.?)")
_DIM = re.compile(r"((?P<name>[^=\],]+)=)?(?P<sizes>[0-9]+:[0-9]+(\*[0-9]+:[0-9]+)*)")


@dataclass(frozen=True)
class MeshDim:
    """One mesh dim: sizes and strides into the list of ranks; several of them where dims were flattened into one."""

    name: str | None
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        size = 1
        for s in self.sizes:
            size *= s
        return size

    def offsets(self) -> Iterator[int]:
        """Offset into the list of ranks of each coordinate along this dim, in order."""
        for digits in itertools.product(*(range(s) for s in self.sizes)):
            yield sum(d * stride for d, stride in zip(digits, self.strides))

    def coordinate(self, position: int) -> int:
        """Coordinate along this dim of the rank at `position` in the list of ranks."""
        result = 0
        for size, stride in zip(self.sizes, self.strides):
            result = result * size + (position // stride) % size
        return result


@dataclass(frozen=True)
class MeshLayout:
    """Device type, dims and ranks of a mesh. Hashable; equal on every rank of the job."""

    device_type: str
    dims: tuple[MeshDim, ...]
    ranks: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Coordinate of a global rank, or None if it is not part of the mesh."""
        if rank not in self.ranks:
            return None
        position = self.ranks.index(rank)
        return tuple(dim.coordinate(position) for dim in self.dims)

    def group(self, rank: int, mesh_dim: int) -> tuple[int, ...]:
        """The global ranks that differ from `rank` along `mesh_dim` only, in order of their coordinate."""
        dim = self.dims[mesh_dim]
        position = self.ranks.index(rank)
        offsets = list(dim.offsets())
        start = position - offsets[dim.coordinate(position)]
        return tuple(self.ranks[start + offset] for offset in offsets)

    def group_over(self, rank: int, mesh_dims: Sequence[int]) -> tuple[int, ...]:
        """The global ranks that differ from `rank` along `mesh_dims` only, row-major in their coordinates."""
        position = self.ranks.index(rank)
        offsets = [list(self.dims[i].offsets()) for i in mesh_dims]
        start = position - sum(found[self.dims[i].coordinate(position)] for i, found in zip(mesh_dims, offsets))
        return tuple(self.ranks[start + sum(place)] for place in itertools.product(*offsets))

    @functools.cached_property
    def in_rank_order(self) -> bool:
        """Whether coordinates grow with ranks in every group. torch makes process groups in rank order, so that groups
        of other meshes (a permuted list of ranks) exchange shards in another order than that of the mesh; see
        `mesh_in_its_order`.
        """
        if all(before < after for before, after in itertools.pairwise(self.ranks)):  # then positions in a group suffice
            return all(before < after for dim in self.dims for before, after in itertools.pairwise(dim.offsets()))
        groups = [self.group(rank, dim) for rank in self.ranks for dim in range(len(self.dims))]
        return all(tuple(sorted(group)) == group for group in groups)

    def dim_name(self, mesh_dim: int) -> str:
        """Name of the mesh dim, or its index if the mesh has no names."""
        return self.dims[mesh_dim].name or str(mesh_dim)

    def __str__(self) -> str:
        def dim_text(dim: MeshDim) -> str:
            sizes = "*".join(f"{size}:{stride}" for size, stride in zip(dim.sizes, dim.strides)) or "1:1"
            return f"{dim.name}={sizes}" if dim.name else sizes

        n = len(self.ranks)
        ranks = str(n) if self.ranks == tuple(range(n)) and n > 0 else ".".join(map(str, self.ranks))
        if n == 1 and self.ranks != (0,):
            ranks += "."  # one rank that is not 0: "3." is the list (3,), "3" would be 0..2
        return f"{self.device_type}[{','.join(map(dim_text, self.dims))}]@{ranks}"


@functools.lru_cache(maxsize=4096)
def parse_mesh(text: str) -> MeshLayout:
    """The layout that the text describes. Raises `SpecTextError` if it does not parse."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise SpecTextError(f"mesh {text!r} does not parse; a mesh looks like 'cpu[dp=2:2,tp=2:1]@4'")
    dims = []
    for part in match["dims"].split(","):
        dim = _DIM.fullmatch(part)
        if dim is None:
            raise SpecTextError(f"mesh {text!r}: dim {part!r} is not of the form name=size:stride")
        pairs = [tuple(map(int, pair.split(":"))) for pair in dim["sizes"].split("*")]
        dims.append(MeshDim(dim["name"], tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)))
    listed = match["ranks"].split(".")
    ranks = tuple(range(int(listed[0]))) if len(listed) == 1 else tuple(int(r) for r in listed if r)
    _check_layout(text, dims, ranks)
    return MeshLayout(match["device"], tuple(dims), ranks)


def _check_layout(text: str, dims: Sequence[MeshDim], ranks: Sequence[int]) -> None:
    pairs = [pair for dim in dims for pair in zip(dim.sizes, dim.strides)]
    if any(size < 1 or stride < 1 for size, stride in pairs):
        raise SpecTextError(f"mesh {text!r}: sizes and strides start at 1")
    if len(set(ranks)) != len(ranks):
        raise SpecTextError(f"mesh {text!r} lists a rank twice")
    if sum((size - 1) * stride for size, stride in pairs) >= len(ranks):
        raise SpecTextError(f"mesh {text!r}: its dims reach past the {len(ranks)} ranks that it lists")


# Meshes seen by a capture in this process, so that a graph finds their process groups by its text.
_meshes: weakref.WeakValueDictionary[str, DeviceMesh] = weakref.WeakValueDictionary()

#: Names of process groups whose ranks are in the order of a mesh that is not in rank order.
_ordered_groups: set[str] = set()


class _Job:
    """The job whose meshes are remembered: its default process group."""

    group: weakref.ref[ProcessGroup] | None = None


def _forget_other_jobs() -> None:
    """Forgets meshes of a job that this process has left (``destroy_process_group``): the next one gives its process
    groups the same names.
    """
    group = dist.group.WORLD
    if group is not (_Job.group() if _Job.group is not None else None):
        forget_meshes()
        _Job.group = weakref.ref(group) if group is not None else None


def mesh_text(mesh: DeviceMesh) -> str:
    """Text of a mesh; remembers the mesh, so that `group_name` finds its process groups by the text.

    Of two meshes with the same text the newer one is remembered, but a mesh with groups in its own order is never
    replaced by one ordered by torch.
    """
    _forget_other_jobs()
    mesh = compat_mesh.real_mesh(mesh)
    layout = mesh_layout(mesh)
    text, known = str(layout), _meshes.get(str(layout))
    if known is None or groups_in_mesh_order(mesh, layout) or not groups_in_mesh_order(known, layout):
        _meshes[text] = mesh
    return text


def mesh_in_its_order(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks of the job, in any order, whose process groups have their ranks in that order.

    torch's own, ``DeviceMesh(device_type, ranks)``, sorts the ranks of each group: if they do not ascend along a mesh
    dim, it scatters and gathers shards by rank, but computes the shard of a rank by its coordinate. All ranks have to
    call this.
    """
    _forget_other_jobs()
    groups = []
    for dim, name in enumerate(names):
        for line in ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist():
            group = compat_mesh.new_group_in_order(line, group_desc=f"mesh_{name}")
            if compat_mesh.my_rank() in line:
                groups.append(group)
    _ordered_groups.update(group.group_name for group in groups)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def groups_in_mesh_order(mesh: DeviceMesh, layout: MeshLayout) -> bool:
    """Whether process groups of the mesh (of that layout) exchange shards in the order of the mesh; the same on all
    ranks.
    """
    if layout.in_rank_order or not compat_mesh.is_member(mesh):
        return True
    _forget_other_jobs()
    return all(compat_mesh.group_name(mesh, dim) in _ordered_groups for dim in range(mesh.ndim))


_guard_mesh_order = fact_guard(
    "GROUPS_IN_MESH_ORDER", lambda t: groups_in_mesh_order(t.device_mesh, mesh_layout(t.device_mesh))
)


def guard_mesh_order(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> None:
    """Guards the compiled code on the group order of its inputs' meshes: meshes that differ in nothing else are equal
    to torch.
    """
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs):
        if not isinstance(value, DTensor) or "grapharg" not in node.meta:
            continue
        if not mesh_layout(compat_mesh.real_mesh(value.device_mesh)).in_rank_order:
            _guard_mesh_order(node.meta["grapharg"].source)


def forget_meshes() -> None:
    """Forgets the remembered meshes: their process groups are destroyed, and new ones may get the same names."""
    _meshes.clear()
    _merged.clear()
    _ordered_groups.clear()


def mesh_layout(mesh: DeviceMesh) -> MeshLayout:
    """Layout of a mesh."""
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    dims = tuple(
        MeshDim(name, sizes or (1,), strides or (1,))
        for name, (sizes, strides) in zip(names, compat_mesh.mesh_dims(mesh))
    )
    return MeshLayout(mesh.device_type, dims, compat_mesh.rank_map(mesh))


def group_name(text: str, mesh_dim: int, rank: int) -> str:
    """Name of the process group of `rank` along a dim of the mesh with that text.

    Raises:
        NoProcessGroupError: this process has no such group.
    """
    _forget_other_jobs()
    mesh = _meshes.get(text)
    name = compat_mesh.group_name(mesh, mesh_dim) if mesh is not None else ""
    if mesh is None or not compat_mesh.group_exists(name):
        name = compat_mesh.group_of_ranks(parse_mesh(text).group(rank, mesh_dim))
    return _named(name, text, (mesh_dim,))


def _named(name: str, text: str, mesh_dims: Sequence[int]) -> str:
    """The name of a process group along dims of a mesh; in rank-free graphs the one that all ranks know."""
    if not is_rank_free():
        return name
    alias = name_on_all_ranks(text, mesh_dims)
    compat_mesh.also_called(name, alias)
    return alias


def merged_group_name(text: str, mesh_dims: Sequence[int], rank: int) -> str:
    """Name of the process group of `rank` along several dims of a mesh at once; makes the group if there is none.

    Its ranks ascend. Making it is a collective call of the ranks of that group only (see `merge_groups`).
    """
    if len(mesh_dims) == 1:
        return group_name(text, mesh_dims[0], rank)
    layout = parse_mesh(text)
    description = "mesh_" + ",".join(layout.dim_name(i) for i in mesh_dims)
    name = compat_mesh.group_of_ranks(sorted(layout.group_over(rank, mesh_dims)), make=description)
    return _named(name, text, mesh_dims)


#: Maximum number of mesh dims for which every subset gets its process group in advance: 4 groups for 3 mesh dims.
MOST_MERGED = 3

#: By the text of a mesh: whether its ranks completed the rendezvous for process groups over several of its dims.
_merged: dict[str, bool] = {}


def merges(text: str) -> bool:
    """Whether plans on the mesh with that text may use collectives over several of its dims at once."""
    _forget_other_jobs()
    return _merged.get(text, True)


def merge_groups(meshes: Iterable[DeviceMesh]) -> bool:
    """Makes the process groups over several mesh dims that plans over these meshes may use, before anything is
    compiled.

    Made in advance, they also exist on a rank that finds its graph in a cache while another compiles it. Ranks make
    them in the same order, that of the meshes in the program, and only after a rendezvous of all ranks of the mesh
    (`store.rendezvous`): if some run other code, plans of the others do without such groups, and no rank waits for
    long.

    Returns:
        whether all groups that plans may use exist; False if a mesh has so many dims that groups are made when a plan
            first needs them.
    """
    complete = True
    for mesh in meshes:
        mesh = compat_mesh.real_mesh(mesh)
        wide = [i for i in range(mesh.ndim) if mesh.size(i) > 1]
        if len(wide) < 2 or not compat_mesh.is_member(mesh):
            continue
        if len(wide) > MOST_MERGED:
            complete = False
            continue
        text, rank = mesh_text(mesh), compat_mesh.my_rank()
        layout = parse_mesh(text)
        several = [dims for size in range(2, len(wide) + 1) for dims in itertools.combinations(wide, size)]
        if len(several) == 1 and compat_mesh.is_whole_job(layout.ranks):
            continue  # the group of the job
        if _merged.get(text) and all(compat_mesh.has_group(sorted(layout.group_over(rank, dims))) for dims in several):
            continue
        _merged[text] = all_arrive(f"process groups of {text}", layout.ranks)
        for dims in several if _merged[text] else ():
            merged_group_name(text, dims, rank)
    return complete


def without_merged_groups(meshes: Iterable[DeviceMesh]) -> list[Decision]:
    """A decision for each of these meshes whose ranks did not all join the rendezvous for groups over several mesh
    dims.
    """
    texts = [mesh_text(real) for mesh in meshes if compat_mesh.is_member(real := compat_mesh.real_mesh(mesh))]
    reason = (
        "its ranks did not all come in time to make groups over several mesh dims: plans send one mesh dim after "
        "the other"
    )
    return [
        Decision("merge_groups", "", reason, text, text, left_alone=True)
        for text in texts
        if _merged.get(text) is False
    ]


#: Seconds that a rank waits for all ranks of two meshes between which a tensor is redistributed. There is no
#: alternative plan, so that this is longer than the time between ranks that run the same program.
JOIN_PATIENCE = 60.0


def join_meshes(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Name of the process group over all ranks of some meshes, for one of these ranks; they make it together if there
    is none.

    Args:
        texts: texts of the meshes, for the error message.
        ranks: all their ranks.

    Raises:
        NoProcessGroupError: not all ranks came within `JOIN_PATIENCE`; each that did raises it.
    """
    ranks = tuple(sorted(ranks))
    if not compat_mesh.has_group(ranks) and not all_arrive(f"process group of {list(ranks)}", ranks, JOIN_PATIENCE):
        raise NoProcessGroupError(
            f"redistribution from mesh {' to mesh '.join(texts)}: not all of the ranks {list(ranks)} came within "
            f"{JOIN_PATIENCE:g} s to make the process group over both meshes: every rank of both calls redistribute "
            "(and compiles the program that does), in the same order; or make the group before, with "
            "torch.distributed.new_group"
        )
    return compat_mesh.group_of_ranks(ranks, make="meshes_" + ",".join(map(str, ranks)))


def group_dim_name(group: ProcessGroup) -> str:
    """Name of the mesh dim that a process group belongs to; the group's own name if no known mesh has it."""
    _forget_other_jobs()
    for mesh in list(_meshes.values()):
        for dim in range(mesh.ndim) if compat_mesh.is_member(mesh) else ():
            if compat_mesh.group_name(mesh, dim) == group.group_name:
                return mesh_layout(mesh).dim_name(dim)
    described = group.group_desc or ""
    if described == "default_pg":
        return "world"
    return described.removeprefix("mesh_") if described not in ("", "undefined") else group.group_name
