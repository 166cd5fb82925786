"""`report_target`: the report of a target by its name, without the printing of ``dtensor-compile report``.

Input: a target and its job. Output: a `Report`. The job is simulated, which needs one process and no network, or real,
under ``torchrun``.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.dynamo.observers.observe import uncompiled
from dtensor_compile.offline.simulated_job import job as simulated_job
from dtensor_compile.recording.recorder import Recording, record
from dtensor_compile.report.build import report_of
from dtensor_compile.report.model import Report
from dtensor_compile.report.recorded import Recordings, Run, failures_recorded, recorded_all, run_backward
from dtensor_compile.report.target import (
    TargetError,
    TargetProgram,
    call_target,
    function_of,
    is_script,
    program_of,
    run_script,
    users_program,
)

#: Ranks of a simulated job if neither a world size nor a mesh is given.
DEFAULT_WORLD = 2

#: Largest number of ranks for which a program is compared with stock torch by default: stock slices gathered tensors
#: into a piece per rank of a mesh dim, so that its graphs, and the time to trace them, grow with the mesh.
STOCK_RANKS = 64


@dataclass(frozen=True)
class Job:
    """The job of a target.

    Attributes:
        mesh: sizes and names of the dims of the mesh that is passed to a function that takes one.
        world: number of ranks; None: that of the mesh.
        rank: the rank that this process takes in a simulated job.
        real: whether the ranks are real, started by ``torchrun``.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    world: int | None = None
    rank: int = 0
    real: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks of a simulated job."""
        return self.world or (math.prod(size for _, size in self.mesh) if self.mesh else DEFAULT_WORLD)


def mesh_of(job: Job, device: str) -> DeviceMesh:
    """The mesh that a target gets: that of the job, or one mesh dim over all ranks."""
    dims = job.mesh or (("tp", dist.get_world_size()),)
    return init_device_mesh(device, tuple(size for _, size in dims), mesh_dim_names=tuple(name for name, _ in dims))


_MESH = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<size>[1-9]\d*)")
#: Default names of mesh dims, by their number.
_NAMES = {1: ("tp",), 2: ("dp", "tp"), 3: ("pp", "dp", "tp")}


def parse_mesh_argument(text: str) -> tuple[tuple[str, int], ...]:
    """Parses ``4x2`` or ``dp=4,tp=2`` into names and sizes of the dims.

    Raises:
        TargetError: `text` is neither.
    """
    parts = [_MESH.fullmatch(part) for part in text.split("," if "=" in text else "x")]
    if not parts or None in parts:
        raise TargetError(f"--mesh {text} is not a mesh: write 4x2, or with names dp=4,tp=2")
    names = _NAMES.get(len(parts), tuple(f"dim{i}" for i in range(len(parts))))
    return tuple((part["name"] or name, int(part["size"])) for part, name in zip(parts, names))  # type: ignore[index]


def report_target(
    target: str,
    arguments: Sequence[str] = (),
    *,
    job: Job = Job(),
    stock: bool | None = None,
    backward: bool = True,
    cluster: str | None = None,
    kernels: str = "aten",
    profile: bool = False,
) -> Report:
    """The report of a target.

    Args:
        target, arguments: as in `dtensor_compile.report.target`; arguments are for scripts.
        job: its job.
        stock: also compile a function's model as stock torch does; None: if the job has at most `STOCK_RANKS` ranks.
            Scripts run once, as they are.
        backward, cluster, kernels: as in `dtensor_compile.report.explain.explain`.
        profile: measure compile time by stage and layer, for a function's model with empty caches.

    Raises:
        TargetError: the target cannot be analyzed.
    """
    with running(job):
        world, rank = dist.get_world_size(), dist.get_rank()
        if is_script(target):
            found, name = Recordings(_script(target, arguments, profile)), "as compiled"
        else:
            compared = world <= STOCK_RANKS if stock is None else stock
            found = _function(target, job, stock=compared, backward=backward, kernels=kernels, profile=profile)
            name = "dtensor"
        report = report_of(found, target=target, cluster=cluster, simulated=not job.real, name=name)
    return replace(report, world=world, rank=rank)  # a script may have destroyed its process group


@contextlib.contextmanager
def running(job: Job) -> Iterator[None]:
    """While active, the job runs: its default process group is initialized.

    Raises:
        TargetError: there is no such job.
    """
    if not job.real:
        if not 0 <= job.rank < job.ranks:
            raise TargetError(
                f"--rank {job.rank} is no rank of a job of {job.ranks} ranks: they are 0 to {job.ranks - 1}"
            )
        if math.prod(size for _, size in job.mesh) > job.ranks:
            raise TargetError(f"the mesh has more devices than --world {job.ranks} has ranks")
        with simulated_job(job.ranks, job.rank):
            yield
        return
    if "WORLD_SIZE" not in os.environ:
        raise TargetError("--real needs ranks: torchrun --nproc-per-node N -m dtensor_compile.cli report --real TARGET")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _script(target: str, arguments: Sequence[str], profile: bool) -> Recording:
    counters.reset()
    with record(others=True, profile=profile) as recording, failures_recorded(recording):
        run_script(target, arguments)
    if not recording.compilations:
        raise TargetError(_never(target))
    return recording


def _never(target: str) -> str:
    return (
        f"{target} never calls a function compiled by torch.compile: return the model and its inputs from a function "
        "and name that, script.py:function, or call torch.compile in it"
    )


def _function(target: str, job: Job, *, stock: bool, backward: bool, kernels: str, profile: bool) -> Recordings:
    function = function_of(target)

    def mesh() -> Any:
        return mesh_of(job, "cuda" if torch.cuda.is_available() and job.real else "cpu")

    def run(program: TargetProgram) -> Run:
        def call(compiled: Callable[..., Any]) -> None:
            with users_program(target):
                out = program.call(compiled)
                if backward:
                    run_backward(out)

        return call

    counters.reset()
    with record(others=True, profile=profile) as recording, failures_recorded(recording):
        program = program_of(call_target(function, target, mesh))
        if program is not None and not recording.compilations and uncompiled(program.model) is not program.model:
            run(program)(program.model)
    if recording.compilations:  # the function, or what it returned, compiles by itself
        return Recordings(recording)
    if program is None:
        raise TargetError(_never(target))
    made = iter((program,))

    def again() -> tuple[Callable[..., Any], Run]:
        this = next(made, None) or program_of(call_target(function, target, mesh))
        assert this is not None
        return this.model, run(this)

    found = recorded_all(again, stock=stock, kernels=kernels, profile=profile)
    if not found.ours.compilations:
        raise TargetError(_never(target))
    return found
