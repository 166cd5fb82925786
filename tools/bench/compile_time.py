"""Compile time of a training step, stock Inductor against this backend: same model, same ranks, empty caches, interleaved repeats.

    python tools/bench/compile_time.py [--layers 4] [--repeats 3] [--layout tp] [--json FILE]

Measured are wall time of the slowest rank and CPU time of the ranks, C++ compiler included, which other work on the machine hardly
changes. Kernels are compiled in one thread per rank, so that the compiler's processes are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from dtensor_compile.compat import counters
from dtensor_compile.compat.inductor import fresh_caches
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Trainer
from dtensor_compile.testing import make_mesh, run_on_ranks


def first_step(layout_name: str, layers: int, backend: str, folder: str | None = None) -> tuple[float, float]:
    """Wall and CPU seconds of the first forward and backward less those of the second, on this rank.

    `folder`: of Inductor's caches; None: empty ones.
    """
    layout = LAYOUTS[layout_name]
    mesh = make_mesh(layout.mesh_shape(dist.get_world_size()), layout.dims)
    counters.reset()

    def wrap(model: torch.nn.Module) -> Any:
        return torch.compile(model, backend=backend, fullgraph=True, options={"compile_threads": 1})

    trainer = Trainer(layout, mesh, LlamaConfig(layers=layers), 1, wrap)
    wall, cpu = [], []
    with fresh_caches() if folder is None else mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        for _ in range(2):
            dist.barrier()
            began = time.perf_counter(), _cpu_seconds()
            trainer.loss(0).backward()
            wall.append(time.perf_counter() - began[0])
            cpu.append(_cpu_seconds() - began[1])
    return wall[0] - wall[1], cpu[0] - cpu[1]


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    world = 4 if args.layout == "2d" else 2
    measured: dict[str, list[tuple[float, float]]] = {"inductor": [], "dtensor": []}
    for repeat in range(args.repeats + 1):
        for backend, values in measured.items():
            ranks = run_on_ranks(world, first_step, args.layout, args.layers, backend, timeout=600)
            wall, cpu = max(r[0] for r in ranks), sum(r[1] for r in ranks)
            note = " (warms up, not counted)" if repeat == 0 else ""
            print(f"repeat {repeat}: {backend} wall {wall:.1f} s, CPU {cpu:.1f} s{note}", flush=True)
            if repeat:
                values.append((wall, cpu))
    medians = {backend: [statistics.median(v) for v in zip(*values)] for backend, values in measured.items()}
    table = Table(title=f"compile time, Llama {args.layers} layers, {args.layout}, {world} ranks, median of {args.repeats}")
    for column in ("", "stock", "ours", "ours / stock"):
        table.add_column(column, justify="right")
    for i, name in enumerate(("wall time", "CPU time")):
        stock, ours = medians["inductor"][i], medians["dtensor"][i]
        table.add_row(name, f"{stock:.1f} s", f"{ours:.1f} s", f"{ours / stock:.2f}")
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"layers": args.layers, "layout": args.layout, "world": world, "measured": measured, "medians": medians}, file)


if __name__ == "__main__":
    main()
