"""A training step on a slow network: how much of what is sent is hidden behind what is computed.

    python tools/bench/overlap.py [--layouts fsdp tp 2d] [--ranks 2 4] [--rates 500 1000 4000] [--repeats 7] [--json FILE]

Runs on the network lab (`tools/netlab.py`), which needs root; where it cannot run the exit status is 2. One row for each layout,
number of ranks and rate (Mbit/s); times are medians over repeats in which the variants take turns, of forward and backward:

    compute     the same ranks at once, with collectives that return at once
    wire        bytes that one rank sends, divided by the rate
    eager, stock, knobs, ours     knobs: stock with its reordering of collectives switched on
    parts       ours with products in parts (``decompose_products``)
    ratio       ours / max(compute, wire)
    memory      peak of resident memory in a step beyond that before it: stock, ours
    exposed     ours beyond compute: predicted, measured
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from dtensor_compile.compat.fake_group import simulated_job
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Trainer
from dtensor_compile.report.recorder import record
from dtensor_compile.topology.links import CLUSTERS, Cluster, Link

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import measure_links  # noqa: E402 - tools beside this one
import netlab  # noqa: E402

#: Stock's own passes for overlap that do not need a GPU.
KNOBS = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
}


def cluster(mbit: float, compute: bool = False) -> Cluster:
    """Hosts of one rank each, with the network and the device that are there. Called on all ranks.

    Args:
        mbit: rate of the network, which is taken where nothing is sent (`compute`).
    """
    link = Link(1e-4, mbit * 1e6 / 8) if compute else measure_links.measure_link()
    device = measure_links.measure_device()
    return dataclasses.replace(CLUSTERS["cpu-1gbit"], name=f"{mbit:g} Mbit/s", between=link, device=device)


def variants(topology: Cluster) -> dict[str, Callable[[Any], Any]]:
    def stock(model: Any, **options: Any) -> Any:
        return torch.compile(model, backend="inductor", options=options)

    def ours(model: Any, **options: Any) -> Any:
        return torch.compile(model, backend="dtensor", fullgraph=True, options={"topology": topology, **options})

    return {
        "eager": lambda model: model,
        "stock": stock,
        "knobs": lambda model: stock(model, **KNOBS),
        "ours": ours,
        "parts": lambda model: ours(model, enable_passes=["decompose_products"]),
    }


def _memory() -> tuple[int, int]:
    """Resident bytes of this process, now and at most since `_forget_peak`."""
    text = pathlib.Path("/proc/self/status").read_text()
    now, peak = (int(re.search(rf"{key}:\s+(\d+)", text)[1]) * 1024 for key in ("VmRSS", "VmHWM"))  # type: ignore[index]
    return now, peak


def _forget_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def measure(layout_name: str, layers: int, topology: Cluster, repeats: int, names: list[str]) -> dict[str, Any]:
    """Seconds of each step by variant on this rank, peak bytes, bytes sent, predicted exposed seconds. On every rank."""
    layout, config = LAYOUTS[layout_name], LlamaConfig(layers=layers)
    mesh = init_device_mesh("cpu", layout.mesh_shape(dist.get_world_size()), mesh_dim_names=layout.dims)
    result: dict[str, Any] = {"seconds": {}, "peak": {}, "failed": {}}
    trainers, wraps = {}, variants(topology)
    for name in names:
        try:
            with record() if name == "ours" else contextlib.nullcontext() as recording:
                trainers[name] = Trainer(layout, mesh, config, 1, wraps[name])
                trainers[name].loss(0).backward()
        except Exception as error:  # noqa: BLE001 - a variant of stock's may not work here, which is a result
            result["failed"][name] = f"{type(error).__name__}: {error}"[:300]
            del trainers[name]
            continue
        if recording is not None:
            result["bytes"] = recording.bytes_sent
            exposed = [d.after for d in recording.decisions if d.kind == "schedule_kernels"]
            result["predicted"] = sum(float(text.split()[0]) for text in exposed) / 1e3
    for _ in range(repeats):
        for name, trainer in trainers.items():
            trainer.optimizer.zero_grad()
            dist.barrier()
            _forget_peak()
            before, began = _memory()[0], time.perf_counter()
            trainer.loss(0).backward()
            result["seconds"].setdefault(name, []).append(time.perf_counter() - began)
            result["peak"].setdefault(name, []).append(_memory()[1] - before)
    return result


def child(args: argparse.Namespace) -> None:
    """One rank: writes its measurements to a file."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.compute:
        with simulated_job(world, rank):
            topology = cluster(args.rates[0], compute=True)
            result = measure(args.layouts[0], args.layers, topology, args.repeats, ["ours"])
    else:
        dist.init_process_group("gloo")
        try:
            topology = cluster(args.rates[0])
            result = measure(args.layouts[0], args.layers, topology, args.repeats, args.variants)
            result["link"] = dataclasses.asdict(topology.between)
        finally:
            dist.destroy_process_group()
    pathlib.Path(f"{args.json}.{rank}").write_text(json.dumps(result))


def row(network: netlab.Network, args: argparse.Namespace, layout: str, mbit: float) -> dict[str, Any]:
    """The figures of one row."""

    def run(*more: str) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            given = ["--child", "--layouts", layout, "--rates", str(mbit), "--layers", str(args.layers)]
            given += ["--repeats", str(args.repeats), "--variants", *args.variants, "--json", f"{folder}/rank", *more]
            network.run([sys.executable, __file__, *given], timeout=args.timeout)
            return [json.loads(pathlib.Path(f"{folder}/rank.{rank}").read_text()) for rank in range(network.ranks)]

    network.set_rate([f"{mbit:g}mbit"])
    computed, ranks = run("--compute"), run()
    slowest = {
        name: statistics.median(max(values) for values in zip(*(rank["seconds"][name] for rank in ranks)))
        for name in ranks[0]["seconds"]
    }
    compute = statistics.median(max(values) for values in zip(*(rank["seconds"]["ours"] for rank in computed)))
    wire = max(rank["bytes"] for rank in ranks) / (mbit * 1e6 / 8)
    return {
        "layout": layout,
        "ranks": network.ranks,
        "mbit": mbit,
        "compute": compute,
        "wire": wire,
        **slowest,
        "failed": ranks[0]["failed"],
        "link": ranks[0]["link"],
        "ratio": slowest["ours"] / max(compute, wire),
        "memory": {name: statistics.median(max(v) for v in zip(*(r["peak"][name] for r in ranks))) for name in slowest},
        "predicted": max(rank["predicted"] for rank in ranks),
        "exposed": slowest["ours"] - compute,
        "all": [rank["seconds"] for rank in ranks],
    }


def table(rows: list[dict[str, Any]], title: str) -> Table:
    result = Table(title=title)
    columns = ["layout", "ranks", "Mbit/s", "compute", "wire", "eager", "stock", "knobs", "ours", "parts", "ratio", "memory", "exposed"]
    for column in columns:
        result.add_column(column, justify="right")
    for this in rows:
        times = [f"{this[name] * 1e3:.0f}" if name in this else "fails" if name in this["failed"] else "-" for name in columns[3:10]]
        memory = " / ".join(f"{this['memory'][name] / 2**20:.0f}" for name in ("stock", "ours") if name in this["memory"])
        exposed = f"{this['predicted'] * 1e3:.0f} / {this['exposed'] * 1e3:.0f}"
        facts = [this["layout"], str(this["ranks"]), f"{this['mbit']:g}", *times, f"{this['ratio']:.2f}", memory, exposed]
        result.add_row(*facts)
    result.caption = "milliseconds; memory: MiB, stock / ours; exposed: predicted / measured"
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", type=float, default=[500, 1000, 4000], help="Mbit/s")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--variants", nargs="+", default=["eager", "stock", "knobs", "ours", "parts"])
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one row")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compute", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0
    rows = []
    try:
        for ranks in args.ranks:
            with netlab.Network(ranks) as network:
                for layout in args.layouts:
                    if len(LAYOUTS[layout].dims) == 2 and ranks < 4:
                        continue
                    for mbit in args.rates:
                        rows.append(row(network, args, layout, mbit))
                        print(json.dumps({key: value for key, value in rows[-1].items() if key != "all"}), file=sys.stderr)
    except netlab.UnavailableError as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 2
    Console(width=160).print(table(rows, f"Llama, {args.layers} layers, forward and backward, torch {torch.__version__}"))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"layers": args.layers, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
