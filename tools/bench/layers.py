"""Compile time of a training step by the number of layers: stock Inductor, and this backend for each value of its
option ``blocks``; same model, same ranks, empty caches, interleaved repeats.

    python tools/bench/layers.py [--layers 2 16] [--repeats 1] [--layout tp] [--variants each traced once]
        [--on ranks] [--json FILE]

Measured is CPU time of all ranks, C++ compiler included, as in ``compile_time.py``; or of one rank of a simulated job,
as in ``emulated_compile.py``, with kernels for the CPU (``--on simulated``) or for an emulated card (``--on h100``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics

import emulated_compile
from compile_time import first_step
from rich.console import Console
from rich.table import Table

from dtensor_compile.demo.train import LAYOUTS
from dtensor_compile.testing import run_on_ranks

STOCK = "stock"


def cpu_seconds(layout: str, layers: int, variant: str, where: str) -> float:
    """CPU seconds of all ranks of a job, or of one simulated rank.

    Args:
        where: ``"ranks"``, ``"simulated"``, or a card to emulate.
    """
    backend, options = ("inductor", None) if variant == STOCK else ("dtensor", {"blocks": variant})
    ranks = 4 if layout in ("2d", "fully_shard_tp") else 2
    if where != "ranks":
        gpu = None if where == "simulated" else where
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(emulated_compile.first_step, (layout, layers, ranks, gpu, options))[1]
    return sum(cpu for _, cpu in run_on_ranks(ranks, first_step, layout, layers, backend, None, options, timeout=1800))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 16))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp")
    parser.add_argument("--variants", nargs="+", default=[STOCK, "each", "traced", "once"])
    parser.add_argument("--on", default="ranks", metavar="ranks|simulated|CARD")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.on != "ranks" and STOCK in args.variants:
        parser.error(f"--on {args.on} takes --variants without {STOCK}: simulated jobs are those of this backend")
    few, many = args.layers
    measured: dict[str, dict[int, list[float]]] = {variant: {few: [], many: []} for variant in args.variants}
    cpu_seconds(args.layout, few, args.variants[0], args.on)  # warms up what stays: headers of the compiler, imports
    for _ in range(args.repeats):
        for layers in args.layers:
            for variant in args.variants:
                measured[variant][layers].append(cpu_seconds(args.layout, layers, variant, args.on))
                print(f"{variant}, {layers} layers: {measured[variant][layers][-1]:.1f} CPU s", flush=True)
    table = Table(title=f"CPU seconds ({args.on}), Llama, {args.layout}, median of {args.repeats}")
    for column in ("", f"{few} layers", f"{many} layers", "ratio", "a layer"):
        table.add_column(column, justify="right")
    for variant, by_layers in measured.items():
        first, last = (statistics.median(by_layers[layers]) for layers in (few, many))
        row = (f"{first:.1f} s", f"{last:.1f} s", f"{last / first:.2f}", f"{(last - first) / (many - few):.2f} s")
        table.add_row(variant, *row)
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"layout": args.layout, "on": args.on, "measured": measured}, file)


if __name__ == "__main__":
    main()
