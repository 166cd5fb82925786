"""Layout and groups of a ``DeviceMesh``, and process groups by name and by ranks."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _get_process_group_name,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch
from dtensor_compile.errors import NoProcessGroupError, UnsupportedTorchError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


def real_mesh(mesh: DeviceMesh | FakeScriptObject) -> DeviceMesh:
    """The mesh itself, unwrapped; while tracing it may be a ``FakeScriptObject``."""
    return mesh.real_obj if isinstance(mesh, FakeScriptObject) else mesh


def _flat(value: object) -> tuple[int, ...]:
    """A flat tuple. 2.11 keeps an int for a plain dim and a nested tuple for a flattened one; later releases a flat
    tuple."""
    if isinstance(value, int):
        return (value,)
    return tuple(i for part in value for i in _flat(part))  # type: ignore[attr-defined]


def mesh_dims(mesh: DeviceMesh) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Per mesh dim, its sizes and its strides into the rank map; several entries if dims were flattened into one."""
    return [(_flat(dim.shape), _flat(dim.stride)) for dim in mesh._layout]


def rank_map(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks that the layout of the mesh indexes: those of its root mesh, equal on every rank."""
    return tuple(mesh._flatten_rank_map)


def group_name(mesh: DeviceMesh, mesh_dim: int) -> str:
    """Name of the process group of this rank along `mesh_dim`."""
    return str(mesh._dim_group_names[mesh_dim])


def is_member(mesh: DeviceMesh) -> bool:
    """Whether this rank is part of the mesh."""
    return mesh.get_coordinate() is not None


def default_store() -> dist.Store:
    """The store of the default process group."""
    return _get_default_store()


def group_exists(name: str) -> bool:
    """Whether this process has a live process group of that name."""
    try:
        return _resolve_process_group(cast("GroupName", name)) is not None
    except UnsupportedTorchError:  # torch has no such function
        raise
    except (RuntimeError, LookupError):
        return False


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    return _resolve_process_group(cast("GroupName", name))


def group_ranks(name: str) -> list[int]:
    """The global ranks of the process group of that name, in group order."""
    return dist.get_process_group_ranks(group_named(name))


def also_called(name: str, alias: str) -> None:
    """Gives the process group of that name another one, under which collectives in graphs find it.

    torch forgets it with the default process group. A group that has been destroyed and made again is named anew.
    """
    group = group_named(name)
    if group_exists(alias):
        if group_named(alias) is group:
            return
        _unregister_process_group(cast("GroupName", alias))
    _register_process_group(cast("GroupName", alias), group)


def all_groups() -> list[tuple[str, tuple[int, ...], str]]:
    """Name, global ranks (in group order) and backend of every process group of this rank, in order of creation."""
    return [
        (str(_get_process_group_name(group)), tuple(distributed_c10d._world.pg_group_ranks[group]), str(backend))
        for group, (backend, _) in distributed_c10d._world.pg_map.items()
    ]


def is_simulated(name: str) -> bool:
    """Whether a process group belongs to a simulated job and transfers nothing (torch's ``fake`` backend)."""
    group = _resolve_process_group(cast("GroupName", name)) if group_exists(name) else None
    return group is not None and dist.get_backend(group) == "fake"


def has_group(ranks: Sequence[int]) -> bool:
    """Whether this process has a process group with exactly these global ranks, in this order."""
    return any(members == tuple(ranks) for _, members, _ in all_groups())


def is_whole_job(ranks: Sequence[int]) -> bool:
    """Whether these are all ranks of the job."""
    return len(ranks) == dist.get_world_size()


_other_rank: contextvars.ContextVar[int | None] = contextvars.ContextVar("dtensor_compile_other_rank", default=None)


def my_rank() -> int:
    """The global rank of this process; within `seen_by`, that of the other rank."""
    other = _other_rank.get()
    return dist.get_rank() if other is None else other


@contextlib.contextmanager
def seen_by(rank: int, coordinates: Sequence[tuple[DeviceMesh, tuple[int, ...]]]) -> Iterator[None]:
    """While active, local tensors have the shapes on this thread that they have on another rank. Nothing may be sent.

    Args:
        rank: the other rank.
        coordinates: the meshes involved, and the coordinate of that rank in each.
    """
    token = _other_rank.set(rank)
    try:
        with contextlib.ExitStack() as stack:
            for mesh, coordinate in coordinates:
                stack.enter_context(_at_coordinate(real_mesh(mesh), coordinate))
            yield
    finally:
        _other_rank.reset(token)


@contextlib.contextmanager
def _at_coordinate(mesh: DeviceMesh, coordinate: tuple[int, ...]) -> Iterator[None]:
    """While active, a mesh reports another coordinate for this process."""
    own, mesh._coordinate_on_dim = mesh._coordinate_on_dim, coordinate
    try:
        yield
    finally:
        mesh._coordinate_on_dim = own


def group_of_ranks(ranks: Sequence[int], make: str | None = None) -> str:
    """The name of a process group with exactly these global ranks, in this order.

    Args:
        make: description of a new group, made together with only the other ranks of the group if this process has none.

    Raises:
        NoProcessGroupError: this process has none, and `make` is None.
    """
    wanted = tuple(ranks)
    for name, members, _ in all_groups():
        if members == wanted:
            return name
    if make is not None:
        with unset_fake_temporarily(), disable_proxy_modes_tracing(), _named_by_members():
            new_group_in_order(wanted, use_local_synchronization=True, group_desc=make)
        return group_of_ranks(ranks)
    raise NoProcessGroupError(
        f"no process group with the ranks {list(wanted)} exists in this process: create the DeviceMesh before the "
        "graph that uses it is compiled or loaded"
    )


#: Before 2.13 torch sorts the ranks of each group.
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def new_group_in_order(ranks: Sequence[int], **options: Any) -> Any:
    """``dist.new_group`` for ranks in the given order.

    Raises:
        UnsupportedTorchError: the ranks do not ascend, and the installed torch sorts them.
    """
    if _KEEPS_ORDER:
        return dist.new_group(list(ranks), sort_ranks=False, **options)
    if list(ranks) != sorted(ranks):
        raise UnsupportedTorchError(
            f"dtensor_compile: torch {torch.__version__} sorts the ranks of a process group, and {list(ranks)} have to "
            "stay in their order: number the ranks of the mesh so that they ascend along each mesh dim, or use torch "
            "2.13"
        )
    return dist.new_group(list(ranks), **options)


class _Made:
    """The number of groups that this process has made per tuple of ranks, within one default process group."""

    group: dist.ProcessGroup | None = None
    counts: Counter[tuple[int, ...]] = Counter()


_NAME = patch("torch.distributed.distributed_c10d:_hash_ranks_to_str", "ranks")


@needs(
    "groups that only their members make",
    _NAME,
    without="ranks could deadlock if one has made more groups than another",
    essential=True,
    upstream="#173608, #189073",
    remove_when="the name that new_group(use_local_synchronization=True) makes depends on the group's members alone",
)
@contextlib.contextmanager
def _named_by_members() -> Iterator[None]:
    """While active, a group that only its members make is named by them and by the number of groups they made together.

    Stock torch puts the number of all groups of the process into the name: ranks would deadlock if one of them has made
    more groups. 2.14 also counts such a group among those that all ranks make, and names the next of these by that
    number; here it is not counted.
    """
    world = distributed_c10d._world
    before = world.group_count

    def name(_: Any, ranks: list[int]) -> str:
        if _Made.group is not dist.group.WORLD:
            _Made.group, _Made.counts = dist.group.WORLD, Counter()
        members = tuple(ranks)
        _Made.counts[members] += 1
        return f"dtensor_compile_{'_'.join(map(str, members))}_{_Made.counts[members]}"

    with patched(_NAME, name):
        try:
            yield
        finally:
            world.group_count = before


def device_is_available(device_type: str) -> bool:
    """Whether this process can use devices of `device_type`."""
    if device_type in ("cpu", "meta"):
        return True
    module = getattr(torch, device_type, None)
    return bool(module is not None and getattr(module, "is_available", lambda: False)())
