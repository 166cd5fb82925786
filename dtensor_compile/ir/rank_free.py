"""Rank-free graphs: graphs that are the same on every rank, because rank-dependent values are read when they run.

    fixed         slice(x, 1, 64, 128)                    all_reduce(x, "sum", "7")
    rank-free     shard_of(x, 1, "cpu[tp=4:1]@4", 0)      all_reduce(x, "sum", "dtensor_compile cpu[tp=4:1]@4 0")

A process group has a name of its own on each rank, so it gets a second one, made of the mesh and its dims. The
coordinate of a rank is read by the operators of `ops/coordinates.py`. Other differences (uneven shards, messages in the
order of ranks) remain in the graphs, which `runtime/artifacts.py` then keeps apart.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("dtensor_compile_rank_free", default=False)


@contextlib.contextmanager
def rank_free(wanted: bool = True) -> Iterator[None]:
    """While active, this thread traces and lowers rank-free graphs, if `wanted`."""
    token = _active.set(wanted)
    try:
        yield
    finally:
        _active.reset(token)


def is_rank_free() -> bool:
    """Whether this thread traces rank-free graphs."""
    return _active.get()


_PREFIX = "dtensor_compile "


def name_on_all_ranks(mesh: str, mesh_dims: Sequence[int]) -> str:
    """The name that the process groups along these dims of a mesh (its text) have on every rank."""
    return f"{_PREFIX}{mesh} {','.join(map(str, mesh_dims))}"


def dims_of_name(name: str) -> tuple[str, tuple[int, ...]] | None:
    """The mesh, and its dims, of a name that `name_on_all_ranks` made; None for other names."""
    mesh, _, dims = name.removeprefix(_PREFIX).rpartition(" ")
    return (mesh, tuple(map(int, dims.split(",")))) if name.startswith(_PREFIX) else None
