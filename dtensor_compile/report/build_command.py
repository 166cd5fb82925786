"""``dtensor-compile build TARGET -o FOLDER``: compiles a program for all ranks of a job, without the job.

Every rank is simulated in a process of its own, which lowers the program; ranks with the same graphs are compiled once,
and the folder is filled for ``options={"artifacts": FOLDER}`` (`runtime/artifacts.py`). Kernels are those of this
machine's CPU.

TARGET is a function as for report, which returns a model and its inputs or a step to call, or a script, which has to
pass ``options={"artifacts": FOLDER}`` to torch.compile itself. Exit status: 0; 2 if the program could not be built.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import torch

from dtensor_compile.compat.dynamo.observers.observe import uncompiled
from dtensor_compile.ir.rank_free import dims_of_name
from dtensor_compile.report.recorded import run_backward
from dtensor_compile.report.report_command import OK, status_of
from dtensor_compile.report.run_target import Job, mesh_of, parse_mesh_argument, running
from dtensor_compile.report.target import (
    TargetError,
    call_target,
    function_of,
    is_script,
    program_of,
    run_script,
    users_program,
)
from dtensor_compile.runtime.artifacts import Build, Groups, building, write

#: By the digest of a program, the digest of its lowered graphs on one rank, and their process groups.
Lowered = dict[str, tuple[str, Groups]]


def parser(program: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("target", help="package.module:function, script.py:function, or script.py with its arguments")
    p.add_argument("rest", nargs="*", metavar="ARGUMENT", help="arguments of a script, after --")
    p.add_argument("-o", "--output", required=True, metavar="FOLDER", help="where to write; made if it is missing")
    p.add_argument("--mesh", metavar="4x2", help="mesh for a function that takes one; with names: dp=4,tp=2")
    p.add_argument("--world", type=int, metavar="N", help="ranks of the job (default: of --mesh, else 2)")
    p.add_argument("--jobs", type=int, metavar="J", help="processes at once (default: one for each CPU core)")
    p.add_argument(
        "--threads",
        type=int,
        default=int(os.environ.get("OMP_NUM_THREADS") or 1),
        metavar="T",
        help="CPU threads of each rank, for which kernels are made (default: OMP_NUM_THREADS, or 1 as torchrun sets)",
    )
    p.add_argument("--no-backward", action="store_true", help="leave out the backward pass of the model's results")
    p.add_argument("--verbose", action="store_true", help="the traceback of an error, and what the program prints")
    # A process of one rank: what it lowered goes to this file.
    p.add_argument("--of-rank", type=int, help=argparse.SUPPRESS)
    p.add_argument("--lowered", help=argparse.SUPPRESS)
    p.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str], program: str = "dtensor-compile build") -> int:
    """Runs the command; returns the exit status."""
    args = parser(program).parse_args(argv)
    if args.of_rank is None:
        return status_of(lambda args: _build(args, argv), args, program)
    return status_of(_of_one_rank, args, program)


def _build(args: argparse.Namespace, argv: Sequence[str]) -> int:
    job = Job(parse_mesh_argument(args.mesh) if args.mesh else (), args.world)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dtensor_compile_build_") as work:
        place = pathlib.Path(work)
        lowered = _in_processes(argv, args, {rank: place / f"{rank}.json" for rank in range(job.ranks)})
        shared = share(lowered)
        if not shared:
            advice = f'pass options={{"artifacts": {args.output!r}}} to torch.compile' if is_script(args.target) else ""
            raise TargetError(f"{args.target} compiled nothing that could be built{': ' * bool(advice)}{advice}")
        firsts = sorted({first for ranks in shared.values() for first in ranks.values()})
        caches = {rank: place / f"caches_{rank}" for rank in firsts}
        again = _in_processes(argv, args, {rank: place / f"{rank}.again.json" for rank in firsts}, caches)
        for rank, programs in again.items():
            if programs.keys() != lowered[rank].keys():
                raise TargetError(f"{args.target} compiled other programs in a second run of rank {rank}")
        torch.set_num_threads(args.threads)  # those of the kernels, noted in the folder
        groups = {
            digest: {rank: lowered[rank][digest][1] for rank in set(of.values())} for digest, of in shared.items()
        }
        write(pathlib.Path(args.output), job.ranks, shared, groups, caches)
    print(built_summary(shared, job.ranks, args.output, time.monotonic() - began))
    return OK


def share(lowered: Mapping[int, Lowered]) -> dict[str, dict[int, int]]:
    """For each program and rank, the first rank whose graphs are the same, over the same process groups if these belong
    to no mesh.

    Args:
        lowered: the lowered programs by rank.
    """
    shared: dict[str, dict[int, int]] = {}
    first: dict[tuple[str, ...], int] = {}
    for rank in sorted(lowered):
        for program, (graphs, groups) in lowered[rank].items():
            others = json.dumps({name: groups[name] for name in sorted(groups) if dims_of_name(name) is None})
            shared.setdefault(program, {})[rank] = first.setdefault((program, graphs, others), rank)
    return shared


def built_summary(shared: Mapping[str, Mapping[int, int]], ranks: int, folder: str, seconds: float) -> str:
    """Summary of what was built, as text."""
    kinds = [len(set(firsts.values())) for firsts in shared.values()]
    everywhere = sum(len(firsts) == ranks and kind == 1 for firsts, kind in zip(shared.values(), kinds))
    return (
        f"{folder}: {len(shared)} program{'s' * (len(shared) > 1)} for {ranks} ranks in {seconds:.0f} s; "
        f"{everywhere} with the same graphs on all ranks, {sum(kinds)} compiled"
    )


def _in_processes(
    argv: Sequence[str],
    args: argparse.Namespace,
    files: Mapping[int, pathlib.Path],
    caches: Mapping[int, pathlib.Path] | None = None,
) -> dict[int, Lowered]:
    """The lowered programs of ranks that are simulated in processes of their own.

    Args:
        files: for each of the ranks, the file to which its process writes.
        caches: Inductor's cache folder of each of the ranks, which compile then; None: they only lower.
    """

    def run(rank: int) -> Lowered:
        split = argv.index("--") if "--" in argv else len(argv)
        own = ["--of-rank", str(rank), "--lowered", str(files[rank]), *(["--compile"] if caches is not None else [])]
        command = [sys.executable, "-m", "dtensor_compile.cli", "build", *argv[:split], *own, *argv[split:]]
        settings = {"OMP_NUM_THREADS": str(args.threads)}
        if caches is not None:
            settings["TORCHINDUCTOR_CACHE_DIR"] = str(caches[rank])
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **settings})
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise TargetError(f"rank {rank}: {lines[-1].removeprefix('dtensor-compile build: ')}")
        return json.loads(files[rank].read_text())  # type: ignore[no-any-return]

    with concurrent.futures.ThreadPoolExecutor(args.jobs or os.cpu_count() or 1) as pool:
        return dict(zip(files, pool.map(run, files)))


def _of_one_rank(args: argparse.Namespace) -> int:
    """Runs the program as one simulated rank, and writes its lowered programs."""
    job = Job(parse_mesh_argument(args.mesh) if args.mesh else (), args.world, args.of_rank)
    build = Build(kernels=args.compile)
    printed = contextlib.nullcontext() if args.verbose else contextlib.redirect_stdout(io.StringIO())
    with running(job), building(build), printed:
        if is_script(args.target):
            run_script(args.target, args.rest)
        else:
            _run_function(args, job, build)
    lowered = {
        digest: (hashlib.sha256("\n".join(texts).encode()).hexdigest(), build.groups[digest])
        for digest, texts in build.graphs.items()
    }
    pathlib.Path(args.lowered).write_text(json.dumps(lowered))
    return OK


def _run_function(args: argparse.Namespace, job: Job, build: Build) -> None:
    found = program_of(call_target(function_of(args.target), args.target, lambda: mesh_of(job, "cpu")))
    if found is None:
        return  # a step that compiles by itself
    with users_program(args.target):
        model = found.model
        if not found.args and not found.kwargs:  # a step, which may compile by itself
            model()
            if build.graphs:
                return
        if uncompiled(model) is model:
            model = torch.compile(model, backend="dtensor", options={"artifacts": args.output})
        out = found.call(model)
        if not args.no_backward:
            run_backward(out)
