"""Names of process groups in rank-free graphs (`ir/rank_free.py`), made known to a process that runs graphs which
others compiled."""

from __future__ import annotations

from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.ir.mesh import merged_group_name, parse_mesh
from dtensor_compile.ir.rank_free import dims_of_name, name_on_all_ranks, rank_free

#: Meshes and mesh dims that code in this process names, of any job: it is loaded once.
_known: set[tuple[str, tuple[int, ...]]] = set()


def know_group(name: str) -> None:
    """Makes a process group known by its name in rank-free graphs, before one runs that was compiled elsewhere."""
    if (place := dims_of_name(name)) is not None:
        _known.add(place)
        with rank_free():
            merged_group_name(*place, compat_mesh.my_rank())


def know_groups_of_this_job() -> None:
    """Makes process groups known again by the names in rank-free graphs that were loaded in an earlier job of this
    process."""
    rank = compat_mesh.my_rank()
    for text, mesh_dims in sorted(_known):
        layout = parse_mesh(text)
        if rank in layout.ranks and compat_mesh.has_group(sorted(layout.group_over(rank, mesh_dims))):
            know_group(name_on_all_ranks(text, mesh_dims))
