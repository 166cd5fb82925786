"""Compile time of a training step, stock Inductor against this backend: same model, same ranks, empty caches,
interleaved repeats.

    python tools/bench/compile_time.py [--layers 4] [--repeats 3] [--layout tp] [--json FILE]

Measured are wall time of the slowest rank and CPU time of the ranks, C++ compiler included, which other work on the
machine hardly changes. Kernels are compiled in one thread per rank, so that the compiler's processes are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Trainer
from dtensor_compile.testing import make_mesh, run_on_ranks

#: Wall seconds of the slowest rank and CPU seconds of all ranks, by what was measured; one pair a repeat.
Measured = dict[str, list[tuple[float, float]]]


def first_step(
    layout_name: str, layers: int, backend: str, folder: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[float, float]:
    """Wall and CPU seconds of the first forward and backward less those of the second, on this rank.

    `folder`: of Inductor's caches; None: empty ones. `options`: of the backend.
    """
    layout = LAYOUTS[layout_name]
    mesh = make_mesh(layout.mesh_shape(dist.get_world_size()), layout.dims)
    counters.reset()

    def wrap(model: torch.nn.Module) -> Any:
        return torch.compile(model, backend=backend, fullgraph=True, options={"compile_threads": 1, **(options or {})})

    trainer = Trainer(layout, mesh, LlamaConfig(layers=layers), 1, wrap)
    with fresh_caches() if folder is None else mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        return seconds_of_first_step(lambda: trainer.loss(0).backward())


def seconds_of_first_step(step: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of the first forward and backward less those of the second, on this rank."""
    wall, cpu = [], []
    for _ in range(2):
        dist.barrier()
        began = time.perf_counter(), _cpu_seconds()
        step()
        wall.append(time.perf_counter() - began[0])
        cpu.append(_cpu_seconds() - began[1])
    return wall[0] - wall[1], cpu[0] - cpu[1]


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def arguments(description: str, repeats: int, **more: str) -> argparse.Namespace:
    """What the benchmark is run with; `ranks` is how many its layout takes.

    Args:
        more: further options by name, with their defaults.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp")
    parser.add_argument("--json", metavar="FILE")
    for name, default in more.items():
        parser.add_argument(f"--{name}", default=default)
    args = parser.parse_args()
    args.ranks = 4 if args.layout == "2d" else 2
    return args


def first_step_of_job(args: argparse.Namespace, backend: str, folder: str | None = None) -> tuple[float, float]:
    """`first_step` on all ranks of a job: wall seconds of the slowest one, CPU seconds of all together."""
    ranks = run_on_ranks(args.ranks, first_step, args.layout, args.layers, backend, folder, timeout=600)
    return max(wall for wall, _ in ranks), sum(cpu for _, cpu in ranks)


def medians_of(measured: Measured) -> dict[str, tuple[float, float]]:
    """Medians of wall and of CPU seconds."""
    walls_and_cpus = {name: tuple(zip(*values)) for name, values in measured.items()}
    return {name: (statistics.median(walls), statistics.median(cpus)) for name, (walls, cpus) in walls_and_cpus.items()}


def report(
    args: argparse.Namespace,
    what: str,
    rows: Mapping[str, tuple[float, float]],
    columns: tuple[str, str],
    measured: Measured,
) -> None:
    """Prints a table of two columns of seconds and the second over the first, and writes the figures to the file asked
    for.
    """
    table = Table(
        title=f"{what}, Llama {args.layers} layers, {args.layout}, {args.ranks} ranks, median of {args.repeats}"
    )
    for column in ("", *columns, f"{columns[1]} / {columns[0]}"):
        table.add_column(column, justify="right")
    for name, (first, second) in rows.items():
        table.add_row(name, f"{first:.1f} s", f"{second:.1f} s", f"{second / first:.2f}")
    Console().print(table)
    if args.json:
        job = {"layers": args.layers, "layout": args.layout, "world": args.ranks}
        with open(args.json, "w") as file:
            json.dump({**job, "measured": measured, "medians": medians_of(measured)}, file)


def main() -> None:
    args = arguments(__doc__, repeats=3)
    measured: Measured = {"inductor": [], "dtensor": []}
    for repeat in range(args.repeats + 1):
        for backend, values in measured.items():
            wall, cpu = first_step_of_job(args, backend)
            note = " (warms up, not counted)" if repeat == 0 else ""
            print(f"repeat {repeat}: {backend} wall {wall:.1f} s, CPU {cpu:.1f} s{note}", flush=True)
            if repeat:
                values.append((wall, cpu))
    medians = medians_of(measured)
    rows = {what: (medians["inductor"][i], medians["dtensor"][i]) for i, what in enumerate(("wall time", "CPU time"))}
    report(args, "compile time", rows, ("stock", "ours"), measured)


if __name__ == "__main__":
    main()
