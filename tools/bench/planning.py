"""What it takes to plan one redistribution that was not planned before, on small and large meshes, with sizes that
divide and not.

    python tools/bench/planning.py [--meshes 2x2,8x8,8x64] [--repeats 5] [--json FILE]

Milliseconds of CPU time on one rank, the median of interleaved repeats with empty caches. A program plans each of its
distinct redistributions once a process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from rich.console import Console
from rich.table import Table

from dtensor_compile.planner import exchange, lower_bound
from dtensor_compile.planner import search as plan
from dtensor_compile.planner import shard_intervals as shards
from dtensor_compile.planner import steps as plan_steps

#: Source, target, shape.
CASES = (
    ("S(0)R", "RR", (2048, 12, 64)),
    ("S(0)R", "RR", (50257, 4096)),
    ("S(0)S(0)", "RS(0)", (50257, 4096)),
    ("P(sum)R", "S(0)R", (50257, 4096)),
    ("P(sum)S(0)", "RS(1)", (2048, 12, 64)),
    ("S(0)S(1)", "S(0)R", (6, 2048, 4096)),
    ("S(0)P(sum)", "S(0)S(1)", (6, 2048, 4096)),
    ("S(0)S(1)", "S(1)S(0)", (4096, 4096)),
)
REMEMBERS = (
    plan._plan, plan_steps._detours, plan_steps._contains, exchange.traffic, exchange._assign,
    lower_bound.sent_lower_bound, lower_bound._in_common, shards.held_intervals, shards.common,
)  # fmt: skip


def milliseconds(source: str, target: str, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> float:
    """CPU time of the plan for a tensor of `shape` (elements per dim), as in a process that has planned nothing yet."""
    for function in REMEMBERS:
        function.cache_clear()
    began = time.process_time()
    plan.cheapest_plan(source, target, mesh_shape, shape)
    return 1e3 * (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--meshes", default="2x2,8x8,8x64", help="of two dims, with commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    meshes = [tuple(map(int, mesh.split("x"))) for mesh in args.meshes.split(",")]
    times: dict[tuple[int, tuple[int, ...]], list[float]] = {}
    milliseconds("S(0)", "R", (2,), (8,))  # imports
    for _ in range(args.repeats):
        for number, case in enumerate(CASES):
            for mesh in meshes:
                times.setdefault((number, mesh), []).append(milliseconds(case[0], case[1], mesh, case[2]))
    table = Table(title="milliseconds of a plan")
    for heading in ("from", "to", "shape", *("x".join(map(str, mesh)) for mesh in meshes), "plan on the last mesh"):
        table.add_column(heading)
    found = []
    for number, (source, target, shape) in enumerate(CASES):
        medians = {"x".join(map(str, mesh)): statistics.median(times[number, mesh]) for mesh in meshes}
        steps = "; ".join(map(str, plan.cheapest_plan(source, target, meshes[-1], shape)))
        found.append({"source": source, "target": target, "shape": shape, "milliseconds": medians, "plan": steps})
        table.add_row(source, target, str(shape), *(f"{median:.1f}" for median in medians.values()), steps)
    Console(width=160).print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
