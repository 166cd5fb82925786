"""What the graph passes of this backend add to compile time.

    python tools/bench/pass_time.py [--layers 32] [--backend dtensor_aten] [--layout tp] [--json FILE]

Measured is on rank 0: seconds of each step on a graph (`dtensor_compile.graph.runner`), those that only report
included, and CPU time of the first forward and backward less those of the second, C++ compiler included.
"""

from __future__ import annotations

import argparse
import json

from compile_time import first_step
from rich.console import Console
from rich.table import Table

from dtensor_compile import record
from dtensor_compile.demo.train import LAYOUTS
from dtensor_compile.testing import run_on_ranks


def step_and_passes(layout: str, layers: int, backend: str) -> tuple[float, dict[str, float]]:
    """CPU seconds of the first step of this rank, and seconds of the steps on graphs in it."""
    with record() as recording:
        _, cpu = first_step(layout, layers, backend)
    return cpu, recording.step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--backend", choices=("dtensor", "dtensor_aten"), default="dtensor_aten")
    parser.add_argument("--layout", choices=LAYOUTS, default="tp")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    ranks = 4 if args.layout == "2d" else 2
    cpu, seconds = run_on_ranks(ranks, step_and_passes, args.layout, args.layers, args.backend, timeout=900)[0]
    table = Table(title=f"passes, Llama {args.layers} layers, {args.layout}, {args.backend}, rank 0 of {ranks}")
    for column in ("", "seconds", "of the first step"):
        table.add_column(column, justify="right")
    total = sum(seconds.values())
    for name, took in (*sorted(seconds.items(), key=lambda row: -row[1]), ("all steps", total), ("first step", cpu)):
        table.add_row(name, f"{took:.2f} s", f"{took / cpu:.1%}")
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {
                    "layers": args.layers,
                    "layout": args.layout,
                    "backend": args.backend,
                    "seconds": seconds,
                    "first": cpu,
                },
                file,
            )


if __name__ == "__main__":
    main()
