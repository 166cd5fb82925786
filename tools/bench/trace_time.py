"""Tracing time of the catalogue's programs that stock handles: stock against this backend, the AOT part alone, in one
process.

    python tools/bench/trace_time.py [--corpus ../shared/corpus] [--only REGEX] [--repeats 3] [--json FILE]

Each program is compiled on two gloo ranks from an empty Dynamo cache, in turn by stock (`aot_eager`) and by
`dtensor_aten`, which compile no kernels; the first round warms torch's caches and is not counted. Measured is CPU time
of rank 0, seconds, from the first call to the end of its backward pass; the figure of a program is the median of its
repeats."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import pathlib
import re
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import run_on_ranks

BACKENDS = ("aot_eager", "dtensor_aten")


def compile_times(corpus: str, names: list[str], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Program -> backend -> CPU seconds of each counted compilation, on this rank."""
    warnings.filterwarnings("ignore")
    sys.path.insert(0, corpus)
    patterns, runner = importlib.import_module("patterns"), importlib.import_module("run_corpus")
    env = patterns.Env(dist.get_rank(), dist.get_world_size())
    times: dict[str, dict[str, list[float]]] = {}
    for name in names:
        case = patterns.CASES[name]
        config = {k: v for k, v in case.flags.get("config", {}).items() if k != "compiled_autograd"}
        backward = case.flags.get("backward", True)
        for repeat in range(repeats + 1):
            for backend in BACKENDS if repeat % 2 else reversed(BACKENDS):
                counters.reset()
                torch.manual_seed(0)
                function, make_args, *rest = case.fn(env)
                args = make_args(5)
                make = rest[1] if len(rest) > 1 else None
                keywords = case.flags.get("compile_kwargs", {})
                compiled = make(backend, False) if make else torch.compile(function, backend=backend, **keywords)
                gc.collect()  # the garbage of the last compilation is not this one's
                with torch._dynamo.config.patch(**config):
                    began = time.process_time()
                    runner._one_call(compiled, args, None, backward)
                    took = time.process_time() - began
                if repeat:
                    times.setdefault(name, {}).setdefault(backend, []).append(took)
        if dist.get_rank() == 0:
            medians = [statistics.median(times[name][b]) for b in BACKENDS]
            print(
                f"{name:44s} stock {medians[0]:7.3f} s  ours {medians[1]:7.3f} s  {medians[1] / medians[0]:5.2f}",
                flush=True,
            )
    return times


def programs(corpus: pathlib.Path, only: str | None) -> dict[str, str]:
    """Name -> category of the programs that stock passes and that are compiled by a plain `torch.compile`."""
    rows = json.loads((corpus / "stock_2_13.json").read_text())
    special = ("compiled_autograd", "export")
    return {
        row["name"]: row["category"]
        for row in rows
        if row["verdict"] == "PASS" and row["category"] not in special and re.search(only or "", row["name"])
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=pathlib.Path, default=pathlib.Path(__file__).parents[3] / "shared" / "corpus")
    parser.add_argument("--only", metavar="REGEX")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    categories = programs(args.corpus, args.only)
    times = run_on_ranks(2, compile_times, str(args.corpus.resolve()), list(categories), args.repeats, timeout=7200)[0]
    medians = {name: [statistics.median(values[b]) for b in BACKENDS] for name, values in times.items()}
    table = Table(title=f"tracing time, stock against this backend, median of {args.repeats}")
    for column in ("category", "programs", "stock", "ours", "total ratio", "median ratio", "largest"):
        table.add_column(column, justify="right")
    for category in [*dict.fromkeys(categories.values()), "all"]:
        rows = [medians[n] for n in medians if category in (categories[n], "all")]
        stock, ours = (sum(r[i] for r in rows) for i in range(2))
        ratios = sorted(r[1] / r[0] for r in rows)
        figures = (
            f"{stock:.1f} s",
            f"{ours:.1f} s",
            f"{ours / stock:.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{ratios[-1]:.2f}",
        )
        table.add_row(category, str(len(rows)), *figures)
    Console().print(table)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"repeats": args.repeats, "times": times}))


if __name__ == "__main__":
    main()
