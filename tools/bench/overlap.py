"""A training step on a slow network: how much of what is sent is hidden behind what is computed.

    python tools/bench/overlap.py [--layouts fsdp tp 2d] [--ranks 2 4] [--rates 500 1000 4000] [--repeats 7] [--json
    FILE]

Runs on the network lab (`tools/netlab.py`), which needs root; where it cannot run the exit status is 2. One row for
each layout, number of ranks and rate (Mbit/s); times are medians over repeats in which the variants take turns, of
forward and backward:

    compute     the same ranks at once, with collectives that return at once
    wire        bytes that one rank sends, divided by the rate
    both        compute while a thread sends as many bytes that it does not depend on: what this machine can do at best
    least       what no order of the same kernels and collectives undercuts, by the estimates of seconds
    forecast    of the kernels that run, by the rates that this machine achieves while all ranks compute and by what a
                collective beside it costs (`tools/measure_device.py`, `tools/measure_links.py`), and its error
    eager, stock, knobs, ours     knobs: stock with its reordering of collectives switched on
    parts       ours with matmuls in parts (``decompose_matmuls``)
    rows        ours with rows sent in place of the embedding (``exchange_rows``)
    ratio       ours / max(compute, wire)
    memory      peak of resident memory in a step beyond that before it: stock, ours
    exposed     predicted; measured in waits; ours beyond compute
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lab import add_arguments, results_of_ranks, show_rows, slowest
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Trainer
from dtensor_compile.recording.recorder import record
from dtensor_compile.report.schedule import schedule
from dtensor_compile.topology.links import CLUSTERS, Cluster, Link
from dtensor_compile.topology.rates import Achieved, curve

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import measure_device  # noqa: E402 - tools beside this one
import measure_links  # noqa: E402
import netlab  # noqa: E402

#: Variants of this backend: their exposure is predicted, and measured in their waits.
OURS = ("ours", "parts", "rows")

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


def with_achieved_rates(this: Cluster) -> Cluster:
    """The cluster with what its device achieves by kind and size of the work, as the first rank measures it while all
    do, and with what its network achieves by kind and size of collectives beside compute. Called on all ranks."""
    clock = measure_device.Clock("cpu", 3)
    products = [point for _, point in measure_device.matmuls(clock, torch.float32, 1 << 30)]
    shared = [Achieved({"float32": curve(products)}, curve(measure_device.copies(clock, 1 << 25)))]
    dist.broadcast_object_list(shared)
    with measure_links.computing():
        by_size = measure_links.measure_collectives(1 << 21, 9)
    device = dataclasses.replace(this.device, achieved=shared[0])
    return dataclasses.replace(this, device=device, between=dataclasses.replace(this.between, collectives=by_size))


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
        "parts": lambda model: ours(model, enable_passes=["decompose_matmuls"]),
        "rows": lambda model: ours(model, enable_passes=["exchange_rows"]),
    }


def _memory() -> tuple[int, int]:
    """Resident bytes of this process, now and at most since `_forget_peak`."""
    text = pathlib.Path("/proc/self/status").read_text()
    now, peak = (int(re.search(rf"{key}:\s+(\d+)", text)[1]) * 1024 for key in ("VmRSS", "VmHWM"))  # type: ignore[index]
    return now, peak


def _forget_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


class Waits:
    """Seconds for which compiled code waits for collectives while active."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.packet = torch.ops._c10d_functional.wait_tensor

    def __enter__(self) -> Waits:
        self.stock = self.packet.default
        self.packet.default = self._wait  # compiled code asks for it by name at each call
        return self

    def __exit__(self, *error: object) -> None:
        self.packet.default = self.stock

    def _wait(self, tensor: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        result = self.stock(tensor)
        self.seconds += time.perf_counter() - began
        return result


class Traffic:
    """Bytes between all ranks over a process group of its own, while the default one is simulated.

    Args:
        rank, world: of the job.
    """

    CHUNK = 1 << 20

    def __init__(self, rank: int, world: int) -> None:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, world, rank == 0)
        self.group = dist.ProcessGroupGloo(store, rank, world, datetime.timedelta(minutes=5))
        self.world = world

    def barrier(self) -> None:
        self.group.barrier().wait()

    def send(self, size: int) -> Callable[[], None]:
        """Starts to send `size` bytes and to receive as many; what is returned waits for them."""
        others = self.world - 1
        chunks = [min(self.CHUNK, size - sent) // others for sent in range(0, size, self.CHUNK)]
        works = []
        for chunk in chunks:
            buffers = (
                torch.empty(chunk * self.world, dtype=torch.uint8),
                torch.empty(chunk * self.world, dtype=torch.uint8),
            )
            works.append(self.group.alltoall_base(*buffers, [], []))
        return lambda: [work.wait() for work in works] and None


def measure_with_traffic(
    layout_name: str, layers: int, topology: Cluster, repeats: int, traffic: Traffic
) -> dict[str, Any]:
    """Seconds of a step whose collectives return at once, by itself (`ours`) and while as many bytes are sent
    (`both`).
    """
    result = measure(layout_name, layers, topology, 0, ["ours"])
    trainer, seconds = result.pop("trainers")["ours"], result["seconds"]
    for _ in range(repeats):
        for name in ("ours", "both"):
            trainer.optimizer.zero_grad()
            traffic.barrier()
            began = time.perf_counter()
            wait = traffic.send(result["bytes"] if name == "both" else 0)
            trainer.loss(0).backward()
            wait()
            seconds.setdefault(name, []).append(time.perf_counter() - began)
    return result


def measure(layout_name: str, layers: int, topology: Cluster, repeats: int, names: list[str]) -> dict[str, Any]:
    """Seconds of each step by variant on this rank, peak bytes, bytes sent, seconds predicted and stood in waits. On
    every rank.
    """
    layout, config = LAYOUTS[layout_name], LlamaConfig(layers=layers)
    mesh = init_device_mesh("cpu", layout.mesh_shape(dist.get_world_size()), mesh_dim_names=layout.dims)
    kinds = ("seconds", "peak", "failed", "predicted", "least", "waited", "forecast")
    result: dict[str, Any] = {kind: {} for kind in kinds}
    achieved = with_achieved_rates(topology) if repeats else topology
    trainers, wraps = result.setdefault("trainers", {}), variants(topology)
    for name in names:
        try:
            with record() if name in OURS else contextlib.nullcontext() as recording:
                trainers[name] = Trainer(layout, mesh, config, 1, wraps[name])
                trainers[name].loss(0).backward()
        except Exception as error:  # noqa: BLE001 - a variant of stock's may not work here, which is a result
            result["failed"][name] = f"{type(error).__name__}: {error}"[:300]
            del trainers[name]
            continue
        if recording is not None:
            result.setdefault("bytes", recording.bytes_sent)
            found = [d for d in recording.decisions if d.kind == "schedule_kernels" and not d.left_alone]
            least = [re.search(r"less than ([\d.]+) ms", d.reason)[1] for d in found]  # type: ignore[index]
            result["predicted"][name] = sum(float(d.after.split()[0]) for d in found) / 1e3
            result["least"][name] = sum(map(float, least)) / 1e3
            graphs = [schedule(graph.operations, graph.collectives, achieved) for graph in recording.graphs]
            result["forecast"][name] = sum(graph.seconds for graph in graphs)
    for _ in range(repeats):
        for name, trainer in trainers.items():
            trainer.optimizer.zero_grad()
            dist.barrier()
            _forget_peak()
            before, began = _memory()[0], time.perf_counter()
            with Waits() as waits:
                trainer.loss(0).backward()
            result["seconds"].setdefault(name, []).append(time.perf_counter() - began)
            result["peak"].setdefault(name, []).append(_memory()[1] - before)
            if name in OURS:
                result["waited"].setdefault(name, []).append(waits.seconds)
    return result


def child(args: argparse.Namespace) -> None:
    """One rank: writes its measurements to a file."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.compute:
        traffic = Traffic(rank, world)
        with simulated_job(world, rank):
            topology = cluster(args.rates[0], compute=True)
            result = measure_with_traffic(args.layouts[0], args.layers, topology, args.repeats, traffic)
    else:
        dist.init_process_group("gloo")
        try:
            topology = cluster(args.rates[0])
            result = measure(args.layouts[0], args.layers, topology, args.repeats, args.variants)
            result["link"] = dataclasses.asdict(topology.between)
        finally:
            dist.destroy_process_group()
    result.pop("trainers", None)
    pathlib.Path(f"{args.json}.{rank}").write_text(json.dumps(result))


def row(network: netlab.Network, args: argparse.Namespace, layout: str, mbit: float) -> dict[str, Any]:
    """The figures of one row."""

    def run(*more: str) -> list[dict[str, Any]]:
        given = ["--layouts", layout, "--rates", str(mbit), "--layers", str(args.layers)]
        given += ["--repeats", str(args.repeats), "--variants", *args.variants, *more]
        return results_of_ranks(network, network.ranks, __file__, given, args.timeout)

    network.set_rate([f"{mbit:g}mbit"])
    computed, ranks = run("--compute"), run()

    alone, seconds = slowest(computed, "seconds"), slowest(ranks, "seconds")
    wire = max(rank["bytes"] for rank in ranks) / (mbit * 1e6 / 8)
    return {
        "layout": layout,
        "ranks": network.ranks,
        "mbit": mbit,
        "compute": alone["ours"],
        "wire": wire,
        "both": alone["both"],
        "least": max(rank["least"]["ours"] for rank in ranks),
        "forecast": max(rank["forecast"]["ours"] for rank in ranks),
        **seconds,
        "failed": ranks[0]["failed"],
        "link": ranks[0]["link"],
        "ratio": seconds["ours"] / max(alone["ours"], wire),
        "memory": slowest(ranks, "peak"),
        "predicted": {name: max(rank["predicted"][name] for rank in ranks) for name in ranks[0]["predicted"]},
        "waited": slowest(ranks, "waited"),
        "exposed": seconds["ours"] - alone["ours"],
        "all": [rank["seconds"] for rank in ranks],
    }


def table(rows: list[dict[str, Any]], title: str) -> Table:
    result = Table(title=title)
    times = ["compute", "wire", "both", "least", "eager", "stock", "knobs", "ours", "parts", "rows", "forecast"]
    for column in ("layout", "ranks", "Mbit/s", *times, "error", "ratio", "memory", "exposed"):
        result.add_column(column, justify="right")
    for this in rows:
        cells = [
            f"{this[name] * 1e3:.0f}" if name in this else "fails" if name in this["failed"] else "-" for name in times
        ]
        memory = " / ".join(
            f"{this['memory'][name] / 2**20:.0f}" for name in ("stock", "ours") if name in this["memory"]
        )
        exposed = (
            f"{this['predicted']['ours'] * 1e3:.0f} / {this['waited']['ours'] * 1e3:.0f} / {this['exposed'] * 1e3:.0f}"
        )
        facts = [
            this["layout"],
            str(this["ranks"]),
            f"{this['mbit']:g}",
            *cells,
            f"{this['forecast'] / this['ours'] - 1.0:+.0%}",
            f"{this['ratio']:.2f}",
            memory,
            exposed,
        ]
        result.add_row(*facts)
    result.caption = "milliseconds; memory: MiB, stock / ours; exposed: predicted / in waits / beyond compute"
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["tp", "fsdp", "2d"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", type=float, default=[500, 1000, 4000], help="Mbit/s")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--variants", nargs="+", default=["eager", "stock", "knobs", "ours", "parts", "rows"])
    add_arguments(parser, 7, 1800.0)
    parser.add_argument("--compute", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0

    def rows() -> Iterator[dict[str, Any]]:
        for ranks in args.ranks:
            with netlab.Network(ranks) as network:
                for layout in args.layouts:
                    if len(LAYOUTS[layout].dims) < 2 or ranks >= 4:
                        yield from (row(network, args, layout, mbit) for mbit in args.rates)

    title = f"Llama, {args.layers} layers, forward and backward, torch {torch.__version__}"
    return show_rows(rows(), lambda found: table(found, title), 180, args.json, {"layers": args.layers})


if __name__ == "__main__":
    sys.exit(main())
