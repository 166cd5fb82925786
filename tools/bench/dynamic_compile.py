"""Compile time with symbolic sizes (``dynamic=True``) against that with the sizes of the example: same program, empty
caches, in turns.

    python tools/bench/dynamic_compile.py [--only TEXT] [--layers 3] [--repeats 3] [--json FILE]

Programs are the plain and the masked ones of `configurations.py`, on 8 simulated ranks of emulated H100s. Measured is
CPU time of the first forward and backward pass, in a process of its own for each measurement. Kernels are compiled in
that process, so that all their time is counted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import time
import warnings
from typing import Any

import torch
from configurations import RANKS, SMALL, build
from rich.console import Console
from rich.table import Table

from dtensor_compile import offline
from dtensor_compile.compat.inductor.compile import fresh_caches

PROGRAMS = (
    "fully_shard: plain",
    "fully_shard x tensor parallel: plain",
    "fully_shard: masked",
    "fully_shard x tensor parallel: masked",
)


def first_step(name: str, layers: int, dynamic: bool) -> float:
    """CPU seconds of the first forward and backward pass of a program, in this process."""
    warnings.simplefilter("ignore")
    config = dataclasses.replace(SMALL, layers=layers)
    with fresh_caches(), offline.job(RANKS), offline.device("h100"):
        built = build(name, "cuda", config)
        options: dict[str, Any] = {"dynamic": dynamic, "options": {"compile_threads": 1}}
        began = time.process_time()
        built.step(lambda f: torch.compile(f, backend="dtensor", fullgraph=True, **options))
        return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="programs with this text in their names")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"static": [], "dynamic": []} for name in PROGRAMS if args.only in name
    }
    for repeat in range(args.repeats):
        for name, measured in seconds.items():
            for kind, values in measured.items():
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    values.append(pool.apply(first_step, (name, args.layers, kind == "dynamic")))
                print(f"repeat {repeat}: {name}, {kind} {values[-1]:.1f} s", flush=True)
    rows = []
    table = Table(
        title=f"CPU time of the first step, Llama {args.layers} layers, {RANKS} emulated H100s, median of "
        f"{args.repeats}"
    )
    for column in ("program", "static", "dynamic", "dynamic / static"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for name, measured in seconds.items():
        static, dynamic = (statistics.median(measured[kind]) for kind in ("static", "dynamic"))
        rows.append(
            {"name": name, "static": static, "dynamic": dynamic, "ratio": dynamic / static, "measured": measured}
        )
        table.add_row(name, f"{static:.1f} s", f"{dynamic:.1f} s", f"{dynamic / static:.2f}")
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"layers": args.layers, "ranks": RANKS, "programs": rows}, file)


if __name__ == "__main__":
    main()
