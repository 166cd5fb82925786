"""The order of the code that runs: which collectives have no kernel between start and wait, and what is exposed, on
GPUs that are not there.

    python tools/bench/order.py [--only TEXT] [--large] [--layers N] [--json FILE]

Configurations are those of `configurations.py`, on 8 simulated ranks of emulated H100s with 8 layers; with ``--large``,
Llama-3-8B shapes on 256 ranks (32 x 8) with 32 layers. The code that Inductor wrote is read
(`dtensor_compile.report.written_code`); seconds are estimates of the cost model for its kernels.

    data parallel    collectives over data-parallel ranks in a forward and backward pass, and for each wrapped module
                     and dtype
    no kernel        those of them that are waited for with no kernel since their start
    ordered          graphs whose kernels were put in order, of those with collectives
    exposed          seconds in which compute waits, as the kernels run; in Inductor's own order; in that of the wrapper
                     in eager, one module ahead (stock runs the wrapper in eager, between its graphs); and below which
                     no order comes
    peak             bytes that the kernels of the pass that holds most hold at most, and the wrapper's own order
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
import warnings
from typing import Any

import torch
from configurations import CONFIGURATIONS, LLAMA_8B, RANKS, SMALL, build
from rich.console import Console
from rich.table import Table

import dtensor_compile
from dtensor_compile import offline
from dtensor_compile.compat.distributed.device_meshes import group_named
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.ir.mesh import group_dim_name
from dtensor_compile.report.written_code import written_collectives
from dtensor_compile.schedule.wrapper_order import simulate_wrapper

#: Ranks of the job in Llama-3-8B shapes, and the meshes of the parallelisms.
LARGE_RANKS = 256
LARGE_MESHES = {
    "fully_shard": (256,),
    "fully_shard x tensor parallel": (32, 8),
    "HSDP": (32, 8),
    "replicate": (256,),
    "DDP": (256,),
}
#: In those shapes: torch shards no matmul whose sizes eight ranks do not divide; the vocabulary may be such.
UNEVEN_VOCABULARY = "plain, uneven vocabulary"


def measure(name: str, large: bool, layers: int) -> dict[str, Any]:
    """One configuration, in this process."""
    warnings.simplefilter("ignore")
    config = dataclasses.replace(LLAMA_8B if large else SMALL, layers=layers)
    shape: dict[str, Any] = {}
    if large:
        shape = {"mesh_shape": LARGE_MESHES[name.partition(":")[0]], "batch": 1}
        if name.endswith(UNEVEN_VOCABULARY):
            config = dataclasses.replace(config, vocab=config.vocab - 3)
    began = time.process_time()
    with fresh_caches(), offline.job(LARGE_RANKS if large else RANKS), offline.device("h100") as device:
        built = build(name.partition(",")[0], "cuda", config, **shape)
        with dtensor_compile.record() as recording:
            built.step(lambda f: torch.compile(f, backend="dtensor", fullgraph=True, **built.options))
        written = [this for graph in device.graphs for this in written_collectives(graph.source)]
        over = {this.group: group_dim_name(group_named(this.group)) for this in written}
        data_parallel = [this for this in written if over[this.group] != "tp"]
    orders = [graph.order for graph in recording.graphs if graph.collectives]
    found = [order for order in orders if order is not None]
    wrapped = sum(hasattr(module, "_get_fsdp_state") for module in built.model.modules()) or 1
    return {
        "name": name,
        "collectives": len(written),
        "data_parallel": len(data_parallel),
        "wrapped": wrapped,
        "no_kernel": sum(not this.between for this in data_parallel),
        "graphs": len(orders),
        "ordered": len(found),
        "seconds": sum(order.after.seconds for order in found),
        "exposed": sum(sum(order.after.exposed.values()) for order in found),
        "exposed_before": sum(sum(order.before.exposed.values()) for order in found),
        "exposed_wrapper": sum(sum(simulate_wrapper(order.tasks, order.wrapped).exposed.values()) for order in found),
        "exposed_least": sum(order.least - _computing(order) for order in found),
        "peak": max(order.after.peak for order in found),
        "peak_wrapper": max(simulate_wrapper(order.tasks, order.wrapped).peak for order in found),
        "cpu_seconds": time.process_time() - began,
    }


def _computing(order: Any) -> float:
    return sum(task.seconds + task.host if task.link is None else task.host for task in order.tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="configurations with this text in their names")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--layers", type=int, help="8, or 32 with --large")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    layers = args.layers or (32 if args.large else 8)
    rows = []
    for name in CONFIGURATIONS:
        if args.large:
            name = name.replace("uneven", UNEVEN_VOCABULARY)
        if args.only in name:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure, (name, args.large, layers)))
            print(rows[-1], flush=True)
    table = Table(
        title="order of the code that runs, emulated H100"
        + (f", Llama-3-8B shapes, {layers} layers, {LARGE_RANKS} ranks" if args.large else "")
    )
    for column in (
        "configuration",
        "collectives",
        "data parallel",
        "a module",
        "no kernel",
        "ordered",
        "step",
        "exposed",
        "Inductor's",
        "wrapper's",
        "least",
        "peak",
        "wrapper's",
    ):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for row in rows:
        table.add_row(
            row["name"],
            str(row["collectives"]),
            str(row["data_parallel"]),
            f"{row['data_parallel'] / row['wrapped']:.1f}",
            f"{row['no_kernel']} ({row['no_kernel'] / max(1, row['data_parallel']):.0%})",
            f"{row['ordered']} of {row['graphs']}",
            *(
                f"{row[key] * 1e3:.2f} ms"
                for key in ("seconds", "exposed", "exposed_before", "exposed_wrapper", "exposed_least")
            ),
            *(f"{row[key] / 2**20:.0f} MiB" for key in ("peak", "peak_wrapper")),
        )
    Console(width=200).print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
