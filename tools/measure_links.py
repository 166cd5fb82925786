"""Measures the network between the ranks of a job, and what a rank computes on.

Latency and bandwidth of the network, what the backend sends for each kind of collective, and the rates of a rank's
device:

    torchrun --nproc-per-node 2 tools/measure_links.py --save network.json [--largest 4194304]
    python tools/netlab.py --ranks 2 --rate 1gbit -- tools/measure_links.py --save network.json

Bandwidth W (bytes a second) is that of `STREAM` all-to-alls in flight at once, latency a (seconds a message) what a
small one takes beyond its bytes:

    seconds = (n - 1) a + bytes / W                        (`topology/links.py`)

A stream, because a link may let a burst through before it holds its rate (`tools/netlab.py`: 192 KB), and looks faster
than it is to messages with pauses between them. Both are measured while every rank computes: gloo's threads need a core
as much as the matmuls that they are to run beside, and on a busy core a message starts later by what the core's turns
take. The device's rates are those of matmuls and copies while all ranks run them, which is how they are when
ranks share a host; its contention is the part of the matmuls of a second that a rank cannot run while it sends.

With ``--largest`` each kind of collective is measured by size too, and estimates take what it took.

The file is a topology for ``options={"topology": "network.json"}`` and ``--cluster`` (`topology/files.py`). What is
sent is counted at the interface that `GLOO_SOCKET_IFNAME` names, headers included; other programs must not use it
meanwhile. The table that is printed is how `topology/backends.py` was made.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from scipy.stats import trim_mean

from dtensor_compile.planner.search import StepKind, elements_sent
from dtensor_compile.topology import CLUSTERS, Device, Link, save_topology
from dtensor_compile.topology.files import KINDS
from dtensor_compile.topology.published_rates import Measured
from dtensor_compile.topology.rates import curve

#: Sizes of the matmul that is timed, and elements that are copied: those of a small model's layer.
PRODUCT, COPIED = (512, 256, 1024), 1 << 18
#: Part of a second of compute that is lost at most, where turns of a busy core hide the rest.
MOST_LOST = 0.95
#: Elements (float32) of the local input of a small and of a large all-to-all, and how many large ones are in flight.
SMALL, LARGE, STREAM = 1 << 10, 1 << 19, 8
#: Seconds for which a collective is repeated, and how often it is at most.
LEAST_SECONDS, MOST_REPEATS = 0.15, 200


def collective(kind: StepKind, elements: int, n: int) -> Callable[[], object]:
    """A call of that collective whose local input has `elements` elements."""
    x = torch.ones(elements)
    if kind == "all_to_all":
        out = torch.empty_like(x)
        return lambda: dist.all_to_all_single(out, x)
    if kind == "all_gather":
        out = torch.empty(n * elements)
        return lambda: dist.all_gather_into_tensor(out, x)
    if kind == "reduce_scatter":
        out = torch.empty(elements // n)
        return lambda: dist.reduce_scatter_tensor(out, x)
    return lambda: dist.all_reduce(x)


def seconds_of(call: Callable[[], object], repeats: int) -> float:
    """Mean of the time of the slowest rank, without the tenth that is shortest and the tenth that is longest.

    On a busy core a message waits for nothing or for a whole turn of another thread. A median shows one or the other,
    and which of them changes from run to run; a step has many messages and takes their mean.

    Args:
        repeats: at least; more until they took `LEAST_SECONDS`.
    """
    call()
    times: list[float] = []
    while len(times) < repeats or (sum(times) < LEAST_SECONDS and len(times) < MOST_REPEATS):  # as many on every rank
        dist.barrier()
        began = time.perf_counter()
        call()
        slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    return float(trim_mean(times, 0.1))


def fit(stream: tuple[float, float], small: tuple[float, float], messages: int) -> Link:
    """The link that explains both (bytes, seconds).

    Args:
        messages: that follow each other in one collective.
    """
    bandwidth = stream[0] / stream[1]
    return Link(max(0.0, small[1] - small[0] / bandwidth) / messages, bandwidth)


@contextlib.contextmanager
def computing() -> Iterator[list[float]]:
    """While active, another thread of this process computes matmuls; yields when each of them ended."""
    a, b, over = torch.ones(PRODUCT[:2]), torch.ones(PRODUCT[1:]), threading.Event()
    ended: list[float] = []

    def matmuls() -> None:
        while not over.is_set():
            torch.mm(a, b)
            ended.append(time.perf_counter())

    thread = threading.Thread(target=matmuls, daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        over.set()
        thread.join()


def streaming(elements: int) -> Callable[[], None]:
    """A call of `STREAM` all-to-alls in flight at once, whose local inputs have so many elements."""
    source = torch.ones(elements)
    targets = [torch.empty_like(source) for _ in range(STREAM)]

    def stream() -> None:
        for work in [dist.all_to_all_single(target, source, async_op=True) for target in targets]:
            work.wait()

    return stream


def measure_link(repeats: int = 7, beside_compute: bool = True) -> Link:
    """The link between the ranks of the job, two or more. Called on all ranks; the same on each.

    Args:
        beside_compute: measured while every rank computes, as it is when a collective is hidden.
    """
    n = dist.get_world_size()
    large = LARGE // n * n
    with computing() if beside_compute else contextlib.nullcontext():
        streamed = 4.0 * STREAM * elements_sent("all_to_all", n, large), seconds_of(streaming(large), repeats)
        elements = SMALL // n * n
        small = (
            4.0 * elements_sent("all_to_all", n, elements),
            seconds_of(collective("all_to_all", elements, n), 3 * repeats),
        )
    return fit(streamed, small, n - 1)


def measure_collectives(largest: int, repeats: int = 5) -> tuple[Measured, ...]:
    """What each kind of collective achieves by its bytes, as `Link.collectives` has it. Called on all ranks; the same
    on each.

    Args:
        largest: elements (float32) of the largest local input; the smallest has 256 for each rank.
    """
    n, found = dist.get_world_size(), []
    for kind in KINDS:
        points, elements = [], 256 * n
        while elements <= largest:
            sent = 4.0 * elements_sent(kind, n, elements)
            points.append((sent, sent / seconds_of(collective(kind, elements, n), repeats)))
            elements *= 4
        found.append(Measured(kind, n, curve(points)))
    return tuple(found)


def measure_device(repeats: int = 9) -> Device:
    """What each rank computes on while all compute; the same on every rank. Called on all ranks."""

    def slowest(call: Callable[[], object]) -> float:
        call()
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        if dist.is_initialized():
            dist.barrier()
        result = torch.tensor(statistics.median(times), dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(result, dist.ReduceOp.MAX)
        return result.item()

    peak = []
    for dtype in (torch.float32, torch.float64):
        a, b = torch.ones(PRODUCT[:2], dtype=dtype), torch.ones(PRODUCT[1:], dtype=dtype)
        peak.append((a.element_size(), 2 * math.prod(PRODUCT) / slowest(lambda a=a, b=b: torch.mm(a, b))))
    source = torch.ones(COPIED)
    target, small = torch.empty_like(source), torch.ones(1)
    memory = 2 * source.nbytes / slowest(lambda: target.copy_(source))
    launch = slowest(lambda: torch.neg(small, out=small))
    contention = measure_contention(repeats) if dist.is_initialized() else 0.0
    return Device(tuple(peak), memory, launch, contention=contention)


def measure_contention(repeats: int = 9) -> float:
    """Seconds of compute that a rank loses for each second that it sends, all ranks at once; the same on every rank.
    Called on all ranks.

    Args:
        repeats: of a stream that is sent while matmuls run, which then run as long alone; their median counts.
    """
    n = dist.get_world_size()
    stream = streaming(LARGE // n * n)
    stream()
    parts = []
    with computing() as ended:
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            stream()
            sent = time.perf_counter()
            time.sleep(sent - began)
            over = time.perf_counter()
            beside = sum(began <= at < sent for at in ended) / (sent - began)
            alone = sum(sent <= at < over for at in ended) / (over - sent)
            parts.append(1.0 - beside / alone if alone else 0.0)
    lost = torch.tensor(statistics.median(parts), dtype=torch.float64)
    dist.all_reduce(lost, dist.ReduceOp.MAX)
    return min(MOST_LOST, max(0.0, lost.item()))


def sent_bytes() -> int | None:
    """Bytes that the interface of the ranks has sent; None where no interface is named."""
    counter = pathlib.Path(f"/sys/class/net/{os.environ.get('GLOO_SOCKET_IFNAME', '')}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="FILE.json", help="write the topology there")
    parser.add_argument("--name", default="measured")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--largest", type=int, default=0, help="measure each kind by size up to this many elements (float32) too"
    )
    parser.add_argument("--elements", type=int, default=1 << 20, help="local input of what is counted, in float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    link, device = measure_link(args.repeats), measure_device(args.repeats)
    if args.largest:
        link = dataclasses.replace(link, collectives=measure_collectives(args.largest, args.repeats))
    table = Table(title=f"{n} ranks: latency {link.latency * 1e6:.0f} us, {link.bandwidth * 8 / 1e6:.0f} Mbit/s")
    for column in ("collective", "by the formula", "on the wire", "factor", "ms"):
        table.add_column(column, justify="right")
    for kind in KINDS:
        elements = args.elements // n * n
        call, formula = collective(kind, elements, n), 4 * elements_sent(kind, n, elements)
        milliseconds = seconds_of(call, args.repeats) * 1e3
        dist.barrier()
        before = sent_bytes()
        for _ in range(4):
            call()
        dist.barrier()  # nothing is left in a queue
        after = sent_bytes()
        sent = (after - before) / 4 if before is not None and after is not None else None
        factor = "-" if sent is None else f"{sent / formula:.2f}"
        table.add_row(kind, f"{formula:,}", "-" if sent is None else f"{sent:,.0f}", factor, f"{milliseconds:.1f}")
    if rank == 0:
        table.caption = f"a rank: {device.peak[0][1] / 1e9:.1f} Gflop/s in float32, {device.memory / 1e9:.1f} GB/s, "
        table.caption += f"{device.contention:.2f} s of compute lost for each second of communication beside it"
        Console().print(table)
        if args.save:
            hosts = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            links = {"inside": link, "between": link} if hosts == n else {"between": link}
            about = {"name": args.name, "ranks_per_host": hosts, "device": device, **links}
            save_topology(dataclasses.replace(CLUSTERS["cpu-1gbit"], **about), args.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
