"""``make matrix``: every operator over every pair of placements on every mesh, in one process for each core."""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import itertools
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Sequence

import torch

from tests.matrix.programs import MESHES, OPERATORS, Outcome, check

#: How many tasks this process has done.
_done = itertools.count(1)


def _task(operator: str, mesh: tuple[int, ...]) -> tuple[str, tuple[int, ...], Outcome, float]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # Graphs that are still being traced are looked through again and again for what could be freed: a tenth of the
    # time.
    gc.disable()
    torch._dynamo.config.run_gc_after_compile = False
    begin = time.process_time()
    outcome = check(operator, mesh)
    if next(_done) % 3 == 0:  # a collection takes as long as a tenth of a short task
        gc.collect()
    return operator, mesh, outcome, time.process_time() - begin


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.matrix.run", description=__doc__)
    parser.add_argument("--operators", default=",".join(OPERATORS), help="names, with commas (default: all)")
    parser.add_argument(
        "--meshes", default=",".join("x".join(map(str, mesh)) for mesh in MESHES), help="such as 2,3,2x2"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args(argv)
    meshes = [tuple(map(int, mesh.split("x"))) for mesh in args.meshes.split(",")]
    tasks = [
        (operator, mesh) for mesh in reversed(meshes) for operator in args.operators.split(",")
    ]  # the long ones first
    begin, sums, cpu = time.monotonic(), [0, 0, 0], 0.0
    context = multiprocessing.get_context("fork")  # torch is imported once, and nothing has run yet
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for future in concurrent.futures.as_completed([pool.submit(_task, *task) for task in tasks]):
            operator, mesh, outcome, seconds = future.result()
            counts = [len(outcome.equal), len(outcome.refused), len(outcome.wrong)]
            sums, cpu = [a + b for a, b in zip(sums, counts)], cpu + seconds
            message = f"equal {counts[0]}, refused by eager {counts[1]}, wrong {counts[2]}, {seconds:.0f} s"
            print(f"{operator:11} {'x'.join(map(str, mesh)):4} {message}", flush=True)
            for number, found in outcome.wrong.items():
                print(f"    pair {number}: " + "\n        ".join(found[:3]), flush=True)
    message = f"{sum(sums)} programs: {sums[0]} equal, {sums[1]} refused by eager, {sums[2]} wrong"
    print(f"{message}; {time.monotonic() - begin:.0f} s, {cpu:.0f} s of CPU time")
    return 1 if sums[2] else 0


if __name__ == "__main__":
    sys.exit(main())
