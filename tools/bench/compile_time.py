"""Compile time of a training step, stock Inductor against this backend: same model, same ranks, empty caches, interleaved repeats.

    python tools/bench/compile_time.py [--layers 4] [--repeats 3] [--layout tp] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from dtensor_compile.compat import counters
from dtensor_compile.compat.inductor import fresh_caches
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Trainer
from dtensor_compile.testing import make_mesh, run_on_ranks


def first_step(layout_name: str, layers: int, backend: str) -> float:
    """Seconds of the first forward and backward less those of the second, on this rank."""
    layout = LAYOUTS[layout_name]
    mesh = make_mesh(layout.mesh_shape(dist.get_world_size()), layout.dims)
    counters.reset()
    trainer = Trainer(layout, mesh, LlamaConfig(layers=layers), 1, lambda m: torch.compile(m, backend=backend, fullgraph=True))
    seconds = []
    with fresh_caches():
        for _ in range(2):
            dist.barrier()
            began = time.perf_counter()
            trainer.loss(0).backward()
            seconds.append(time.perf_counter() - began)
    return seconds[0] - seconds[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    world = 4 if args.layout == "2d" else 2
    seconds: dict[str, list[float]] = {"inductor": [], "dtensor": []}
    for repeat in range(args.repeats + 1):
        for backend, values in seconds.items():
            slowest = max(run_on_ranks(world, first_step, args.layout, args.layers, backend, timeout=600))
            print(f"repeat {repeat}: {backend} {slowest:.1f} s" + (" (warms up, not counted)" if repeat == 0 else ""), flush=True)
            if repeat:
                values.append(slowest)
    stock, ours = (statistics.median(v) for v in seconds.values())
    table = Table(title=f"compile time, Llama {args.layers} layers, {args.layout}, {world} ranks, median of {args.repeats}")
    for column in ("stock", "ours", "ours / stock"):
        table.add_column(column, justify="right")
    table.add_row(f"{stock:.1f} s", f"{ours:.1f} s", f"{ours / stock:.2f}")
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"layers": args.layers, "layout": args.layout, "world": world, "seconds": seconds, "ratio": ours / stock}, file)


if __name__ == "__main__":
    main()
