"""What the graph passes of this backend add to compile time.

    python tools/bench/pass_time.py [--layers 32] [--backend dtensor_aten] [--layout tp] [--json FILE]

Measured is CPU time on rank 0: of each pass and stage, and of the first forward and backward less those of the second, C++ compiler
included. Passes that run inside of `run_passes` count there too: what is left of it is copies of the graph, to take a pass back.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from compile_time import first_step
from rich.console import Console
from rich.table import Table

from dtensor_compile import backend as stages
from dtensor_compile import passes
from dtensor_compile.demo.train import LAYOUTS
from dtensor_compile.testing import run_on_ranks

#: Stages of `backend.py` that are no part of any pass.
STAGES = (
    "run_passes", "tell_ranges", "spread_by_mask", "view_again", "order_collectives", "hold_collectives", "hold_draws", "split_nary",
    "lower_redistributions", "lower_collectives", "rearrange",
)  # fmt: skip
PASSES_OF_BACKEND = ("drop_copies", "order_rows", "send_transposed")


@contextlib.contextmanager
def timed() -> Iterator[dict[str, float]]:
    """CPU seconds by name of pass or stage while it is entered."""
    seconds: dict[str, float] = defaultdict(float)

    def time_of(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[function.__name__] += time.process_time() - began

        return run

    lowered = stages.passes_after_lowering
    with contextlib.ExitStack() as stack:
        for name in (*STAGES, *PASSES_OF_BACKEND):
            stack.enter_context(mock.patch.object(stages, name, time_of(getattr(stages, name))))
        stack.enter_context(mock.patch.object(passes, "PASSES", tuple(map(time_of, passes.PASSES))))
        after = lambda *args, **kwargs: tuple(map(time_of, lowered(*args, **kwargs)))  # noqa: E731
        stack.enter_context(mock.patch.object(stages, "passes_after_lowering", after))
        yield seconds


def step_and_passes(layout: str, layers: int, backend: str) -> tuple[float, dict[str, float]]:
    """CPU seconds of the first step of this rank, and of passes and stages in it."""
    with timed() as seconds:
        _, cpu = first_step(layout, layers, backend)
    return cpu, dict(seconds)


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
    for column in ("", "CPU time", "of the first step"):
        table.add_column(column, justify="right")
    total = sum(took for name, took in seconds.items() if name in STAGES)
    for name, took in (*sorted(seconds.items(), key=lambda row: -row[1]), ("all stages", total), ("first step", cpu)):
        table.add_row(name, f"{took:.2f} s", f"{took / cpu:.1%}")
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"layers": args.layers, "layout": args.layout, "backend": args.backend, "seconds": seconds, "first": cpu}, file)


if __name__ == "__main__":
    main()
