"""Warm start: what the first step of a job costs where an earlier job has left its graphs and kernels in Inductor's caches.

    python tools/bench/warm_start.py [--layers 4] [--repeats 2] [--layout tp] [--json FILE]

Each job has new processes. Measured are wall time of the slowest rank and CPU time of the ranks, C++ compiler included, of the first forward
and backward less those of the second: cold with empty caches, warm in the job after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile

from compile_time import first_step
from rich.console import Console
from rich.table import Table

from dtensor_compile.demo.train import LAYOUTS
from dtensor_compile.testing import run_on_ranks
from dtensor_compile.testing.ranks import end_jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    world = 4 if args.layout == "2d" else 2
    measured: dict[str, list[tuple[float, float]]] = {}
    for repeat in range(args.repeats):
        for backend in ("inductor", "dtensor"):
            with tempfile.TemporaryDirectory() as folder:
                for start in ("cold", "warm"):
                    ranks = run_on_ranks(world, first_step, args.layout, args.layers, backend, folder, timeout=600)
                    end_jobs()
                    wall, cpu = max(r[0] for r in ranks), sum(r[1] for r in ranks)
                    measured.setdefault(f"{backend} {start}", []).append((wall, cpu))
                    print(f"repeat {repeat}: {backend}, {start}: wall {wall:.1f} s, CPU {cpu:.1f} s", flush=True)
    medians = {name: [statistics.median(v) for v in zip(*values)] for name, values in measured.items()}
    table = Table(title=f"first step, Llama {args.layers} layers, {args.layout}, {world} ranks, median of {args.repeats}")
    for column in ("", "cold", "warm", "warm / cold"):
        table.add_column(column, justify="right")
    for backend, name in (("inductor", "stock"), ("dtensor", "ours")):
        for i, what in enumerate(("wall time", "CPU time")):
            cold, warm = (medians[f"{backend} {start}"][i] for start in ("cold", "warm"))
            table.add_row(f"{name}, {what}", f"{cold:.1f} s", f"{warm:.1f} s", f"{warm / cold:.2f}")
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"layers": args.layers, "layout": args.layout, "world": world, "measured": measured, "medians": medians}, file)


if __name__ == "__main__":
    main()
