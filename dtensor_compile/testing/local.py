"""Compares one eager and one compiled step with all ranks in this process, without starting ranks and without hangs.

Eager runs once for all ranks on torch's ``LocalTensor``, whose operators run for each rank and whose collectives run
among its parts. A program cannot be compiled like that: Dynamo traces through a ``LocalTensor``, so that the parts of
all ranks become inputs of one graph, and the graph of a single rank with its collectives, which is to be compared, does
not exist. So each rank compiles the program as in a job, in its own thread, and runs its graphs there; the threads take
turns, and their collectives run in this process (`compat.distributed.rank_threads`). Then each rank's results are
compared with its parts of eager's.

    eager, LocalTensor:   x = {rank 0: ..., rank 1: ...}  -> program ->  y = {rank 0: ..., rank 1: ...}
    compiled, threads:    rank 0: x -> graph -> y,  rank 1: x -> graph -> y

If ``LocalTensor`` refuses the program (branches on sizes that differ between ranks), eager runs in such threads too,
and `Comparison.reference` reports that.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_compile.compat import pytree
from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.distributed.rank_threads import run_in_threads
from dtensor_compile.compat.dtensor.local_tensor import local_tensors, of_rank, random_states
from dtensor_compile.ir import mesh as capture_mesh
from dtensor_compile.ir.mesh import mesh_layout
from dtensor_compile.spmd import annotate
from dtensor_compile.spmd import logical_mesh as spmd_mesh
from dtensor_compile.testing.parity import (
    Case,
    Comparison,
    Difference,
    Settings,
    compare_runs,
    gradients_of,
    local_part,
)
from dtensor_compile.variables import mesh_constructors as factories

#: State of this package that belongs to a process, and here to a rank, with its initial values.
_STATES: tuple[tuple[Any, str, Callable[[], Any]], ...] = (
    (capture_mesh, "_meshes", weakref.WeakValueDictionary),
    (capture_mesh, "_merged", dict),
    (capture_mesh, "_ordered_groups", set),
    (capture_mesh._Job, "group", lambda: None),
    (compat_mesh._Made, "group", lambda: None),
    (compat_mesh._Made, "counts", collections.Counter),
    (spmd_mesh, "_device_meshes", dict),
    (spmd_mesh._Global, "mesh", lambda: None),
    (annotate, "_marked_meshes", set),
    (factories, "_made", dict),
    (factories, "_open", list),
)


@dataclass(frozen=True)
class Reference:
    """Results of eager.

    Attributes:
        found: by name, as `Case.run` returns it; None if each rank runs eager itself.
        random: state of the generator by rank.
        refused: the reason why ``LocalTensor`` did not run the program.
    """

    found: dict[str, Any] | None
    random: dict[int, torch.Tensor]
    refused: str = ""

    @property
    def description(self) -> str:
        return f"eager rank by rank, LocalTensor refuses: {self.refused}" if self.refused else "eager on LocalTensor"


def run_eager(case: Case, world: int) -> Reference:
    """Runs a case in eager, for all ranks at once."""
    try:
        with local_tensors(world) as mode:
            found = case.run(Settings(eager=True))
            return Reference(found, random_states(mode))
    except Exception as error:  # noqa: BLE001 - whatever it is, the ranks see it too if it is the program's own
        lines = str(error).strip().splitlines()
        return Reference(None, {}, f"{type(error).__name__}: {lines[0] if lines else ''}"[:200])
    finally:
        capture_mesh.forget_meshes()


def compare_locally(case: Case, world: int, settings: Settings, reference: Reference | None = None) -> Comparison:
    """As `parity.compare_case`, with all ranks in this process, which has no process group.

    Args:
        reference: eager's results, if they are known already.

    Raises:
        DeadlockError: ranks wait for each other forever.
        Exception: the compiled program raised; the exception is that of the first rank that did.
    """
    eager = reference or run_eager(case, world)
    results = run_in_threads(world, lambda rank: _compare(case, settings, eager, rank), _STATES)
    return Comparison([d for found, _ in results for d in found], results[0][1], eager.description)


def _compare(case: Case, settings: Settings, eager: Reference, rank: int) -> tuple[list[Difference], int]:
    wanted = case.run(Settings(eager=True)) if eager.found is None else None
    compiled = case.run(
        settings, wanted or {name: of_rank(local_part(x), rank, None) for name, x in gradients_of(eager.found or {})}
    )
    if wanted is None:
        meshes: dict[str, DeviceMesh] = {}
        for x in pytree.tree_leaves(compiled):
            if isinstance(x, DTensor):
                meshes.setdefault(str(mesh_layout(x.device_mesh)), x.device_mesh)
        wanted = of_rank(eager.found, rank, lambda mesh: meshes.get(str(mesh_layout(mesh)), mesh))
        wanted["random state"] = eager.random[rank]
    return compare_runs(case, wanted, compiled)
