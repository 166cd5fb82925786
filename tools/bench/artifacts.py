"""Start from artifacts: what the first step of a job costs a rank that compiles nothing itself, since the program was
built in advance (``dtensor-compile build``), against one with empty caches.

    python tools/bench/artifacts.py [--layers 4] [--repeats 3] [--layout tp] [--json FILE]

The program is built once, for simulated ranks. Then jobs of new processes take turns: with empty caches, and with the
artifacts and an empty folder of caches. Measured are wall time of the slowest rank and CPU time of the ranks, C++
compiler included, of the first forward and backward less those of the second.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from compile_time import Measured, arguments, medians_of, report, seconds_of_first_step
from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Trainer
from dtensor_compile.testing import make_mesh, run_on_ranks
from dtensor_compile.testing.ranks import end_jobs

LAYOUT, LAYERS, FOLDER = "DTENSOR_COMPILE_BENCH_LAYOUT", "DTENSOR_COMPILE_BENCH_LAYERS", "DTENSOR_COMPILE_BENCH_FOLDER"


def trainer(mesh: DeviceMesh, layout: str, layers: int, folder: str | None) -> Trainer:
    def wrap(model: torch.nn.Module) -> Any:
        return torch.compile(model, backend="dtensor", fullgraph=True, options={"artifacts": folder})

    return Trainer(LAYOUTS[layout], mesh, LlamaConfig(layers=layers), 1, wrap)


def program(mesh: DeviceMesh) -> Callable[[], None]:
    """The target of the build: one step."""
    built = trainer(mesh, os.environ[LAYOUT], int(os.environ[LAYERS]), os.environ[FOLDER])
    return lambda: built.loss(0).backward()


def build(args: Any, folder: str) -> None:
    """Builds the program into `folder`."""
    layout = LAYOUTS[args.layout]
    mesh = ",".join(f"{name}={size}" for name, size in zip(layout.dims, layout.mesh_shape(args.ranks)))
    target = f"{pathlib.Path(__file__).resolve()}:program"
    command = [sys.executable, "-m", "dtensor_compile.cli", "build", target, "--mesh", mesh, "-o", folder]
    about = {LAYOUT: args.layout, LAYERS: str(args.layers), FOLDER: folder, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env={**os.environ, **about})


def first_step(layout: str, layers: int, folder: str | None, caches: str) -> tuple[float, float]:
    """Wall and CPU seconds of the first step less those of the second, on this rank.

    Args:
        folder: of the artifacts; None without.
        caches: of Inductor.
    """
    mesh = make_mesh(LAYOUTS[layout].mesh_shape(dist.get_world_size()), LAYOUTS[layout].dims)
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=caches):
        made = trainer(mesh, layout, layers, folder)
        return seconds_of_first_step(lambda: made.loss(0).backward())


def main() -> None:
    args = arguments(__doc__, repeats=3)
    measured: Measured = {}
    with tempfile.TemporaryDirectory() as folder:
        build(args, folder)
        for repeat in range(args.repeats):
            for start, artifacts in (("cold", None), ("artifacts", folder)):
                with tempfile.TemporaryDirectory() as caches:
                    call = (args.layout, args.layers, artifacts, caches)
                    ranks = run_on_ranks(args.ranks, first_step, *call, timeout=600)
                    end_jobs()
                wall, cpu = max(wall for wall, _ in ranks), sum(cpu for _, cpu in ranks)
                measured.setdefault(start, []).append((wall, cpu))
                print(f"repeat {repeat}: {start}: wall {wall:.1f} s, CPU {cpu:.1f} s", flush=True)
    medians = medians_of(measured)
    rows = {what: (medians["cold"][i], medians["artifacts"][i]) for i, what in enumerate(("wall time", "CPU time"))}
    report(args, "first step", rows, ("cold", "artifacts"), measured)


if __name__ == "__main__":
    main()
