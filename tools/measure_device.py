"""Measures what a device achieves, by kind of work and size, and writes it for estimates.

    python tools/measure_device.py --save my_gpu.json [--points FILE] [--device cuda] [--repeats 5] [--largest BYTES]
    dtensor-compile plan TARGET --gpu my_gpu.json --cluster h100

Measured are matmuls by their floating-point operations and dtype (square ones, and those of a transformer's layers),
attention and its backward pass, copies by their bytes, the shortest kernel, and what the host needs for an operator in
eager, one over DTensors, and a kernel of compiled code. Each is repeated until it has taken `LEAST` seconds; the median
of repeats counts. A point is (size, rate); `topology/files.py` says how a file holds them, `topology/rates.py` how they
are used.

On a GPU, kernels are captured in a CUDA graph, so that the host does not count. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_compile.topology.files import device_values
from dtensor_compile.topology.gpus import GPUS
from dtensor_compile.topology.rates import curve

#: Seconds for which one thing is measured, at least.
LEAST = 0.02
#: Sizes of square matmuls, and (m, k, n) of those in the layers of a transformer of dim 4096: whole, and an eighth.
SQUARE = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
LAYERS = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 512), (8192, 512, 4096),
          (8192, 4096, 1792), (8192, 1792, 4096), (2048, 4096, 1024), (8192, 4096, 16032))  # fmt: skip
#: (batch, heads, sequence, head dim) of causal attention; smaller ones take less than the host needs to ask for them.
ATTENTION = (
    (4, 32, 1024, 128), (4, 4, 2048, 128), (4, 32, 2048, 64), (4, 32, 2048, 128), (1, 32, 8192, 128)
)  # fmt: skip
Point = tuple[float, float]


class Clock:
    """Seconds of a call on a device."""

    def __init__(self, device: str, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def seconds(self, call: Callable[[], Any], inner: int = 0) -> float:
        """Median seconds of one call.

        Args:
            inner: calls that a CUDA graph holds, for one that takes less than the host needs to issue it; 0: no graph.
        """
        if self.device == "cpu" or not inner:
            call()
            return self._median(call, 1)
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # libraries allocate what they need before a capture
            for _ in range(2):
                call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(inner):
                call()
        return self._median(graph.replay, inner)

    def _median(self, call: Callable[[], Any], inner: int) -> float:
        once = self._run(call, 1)
        times = max(1, min(1000, round(LEAST / max(once, 1e-7))))
        return statistics.median(self._run(call, times) for _ in range(self.repeats)) / inner

    def _run(self, call: Callable[[], Any], times: int) -> float:
        if self.device == "cpu":
            began = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - began) / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times


def matmuls(clock: Clock, dtype: torch.dtype, largest: int) -> Iterator[tuple[tuple[int, ...], Point]]:
    """(m, k, n) and (operations, operations a second)."""
    for m, k, n in (*((size, size, size) for size in SQUARE), *LAYERS):
        if 2 * m * k * n > largest:
            continue
        a, b = (torch.randn(shape, dtype=dtype, device=clock.device) for shape in ((m, k), (k, n)))
        out = torch.empty(m, n, dtype=dtype, device=clock.device)
        seconds = clock.seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), inner=10 if m < 2048 else 0)
        yield (m, k, n), (2 * m * k * n, 2 * m * k * n / seconds)


def attention(clock: Clock, dtype: torch.dtype, largest: int) -> Iterator[tuple[str, tuple[int, ...], Point]]:
    """Direction, (batch, heads, sequence, head dim) and (operations, operations a second), of causal attention;
    operations as torch counts them, which do not leave out what the mask hides (the backward: 2.5 times those)."""
    for batch, heads, sequence, dim in ATTENTION:
        operations = 4 * batch * heads * sequence * sequence * dim
        if operations > largest:
            continue
        shape = (batch, heads, sequence, dim)
        given = [torch.randn(shape, dtype=dtype, device=clock.device, requires_grad=True) for _ in range(3)]
        up = torch.randn(shape, dtype=dtype, device=clock.device)

        def forward(given: Sequence[torch.Tensor] = given) -> torch.Tensor:
            return F.scaled_dot_product_attention(*given, is_causal=True)

        def both(given: Sequence[torch.Tensor] = given, up: torch.Tensor = up) -> None:
            torch.autograd.grad(F.scaled_dot_product_attention(*given, is_causal=True), given, up)

        with torch.no_grad():
            seconds = clock.seconds(forward)
        yield "forward", shape, (operations, operations / seconds)
        backward = clock.seconds(both) - seconds
        yield "backward", shape, (2.5 * operations, 2.5 * operations / max(backward, 1e-9))


def copies(clock: Clock, largest: int) -> Iterator[Point]:
    """(bytes read and written, bytes a second)."""
    size = 1 << 12
    while size <= largest // 2:
        source = torch.ones(size // 4, device=clock.device)
        target = torch.empty_like(source)
        seconds = clock.seconds(lambda s=source, t=target: torch.neg(s, out=t), inner=20 if size < 1 << 26 else 0)
        yield 2 * size, 2 * size / seconds
        size *= 4


def host_seconds(device: str, repeats: int) -> dict[str, float]:
    """Seconds of the host for an operator in eager and each tensor of its lists, what both take more over DTensors, and
    for a kernel of compiled code, a collective in it, and a call of it, forward and backward."""

    def per_call(call: Callable[[], Any], calls: int = 1) -> float:
        for _ in range(3):
            call()
        found = []
        for _ in range(3 * repeats):
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            found.append((time.perf_counter() - began) / calls)
        return statistics.median(found)

    def repeated(x: torch.Tensor) -> None:
        for _ in range(200):
            torch.mul(x, 1.0)

    def in_place(x: torch.Tensor) -> None:
        for _ in range(200):
            x.mul_(1.0)

    def listed(lists: Sequence[Sequence[list[torch.Tensor]]]) -> float:
        one, all_of = (per_call(functools.partial(torch._foreach_mul_, *both)) for both in lists)
        return max(0.0, all_of - one) / 318

    x, w, needs = (torch.ones(8, 8, device=device, requires_grad=gradient) for gradient in (False, False, True))
    short, long = (torch.compile(functools.partial(_kernels, length=length)) for length in (2, 20))
    few, many = (torch.compile(functools.partial(_collectives, length=length)) for length in (2, 20))
    lists = [[[x.clone() for _ in range(length)] for _ in range(2)] for length in (1, 160)]
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    over = [[[DTensor.from_local(y, mesh, [Shard(0)]) for y in values] for values in both] for both in lists]
    with torch.no_grad():
        found = {"eager": per_call(lambda: repeated(x), 200)}
        found["listed"] = listed(lists)
        dispatched = per_call(functools.partial(in_place, over[0][0][0]), 200)
        found["dispatch"] = max(0.0, dispatched - per_call(functools.partial(in_place, x), 200))
        found["dispatched"] = max(0.0, listed(over) - found["listed"])
        call = per_call(lambda: short(x, w))
        found["kernel"] = max(0.0, per_call(lambda: long(x, w)) - call) / 36
        found["collective"] = max(0.0, per_call(lambda: many(x)) - per_call(lambda: few(x))) / 18 - found["kernel"]
        found["call"] = call - 4 * found["kernel"]
    found["eager_with_gradient"] = per_call(lambda: repeated(needs), 200)
    found["call_both_ways"] = per_call(lambda: short(x, needs).sum().backward()) - 12 * found["kernel"]
    return found


def _kernels(x: torch.Tensor, w: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length):
        x = torch.mm(x, w).sin()  # one kernel of a library and one that is generated
    return x


def _collectives(x: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length):
        x = wait_tensor(all_reduce(x, "sum", dist.group.WORLD)).sin()
    return x


def measure(device: str, repeats: int, largest: int) -> dict[str, Any]:
    """Everything that was measured, as plain values: `achieved` and `host` as a file has them, `points` by shape."""
    clock = Clock(device, repeats)
    operations = 1 << 62 if device == "cuda" else 1 << 33
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if device == "cpu":
        del dtypes["bfloat16"]
    points: dict[str, Any] = {"matmul": {}, "attention": {}}
    for name, dtype in dtypes.items():
        for tf32 in ("ieee", "tf32") if name == "float32" and device == "cuda" else ("ieee",):
            torch.backends.cuda.matmul.fp32_precision = tf32
            key = "tf32" if tf32 == "tf32" else name
            points["matmul"][key] = [[*shape, *point] for shape, point in matmuls(clock, dtype, operations)]
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        points["attention"][name] = [[way, *shape, *point] for way, shape, point in attention(clock, dtype, operations)]
    points["copies"] = [list(point) for point in copies(clock, largest)]
    tiny = torch.ones(1, device=device)
    points["launch"] = clock.seconds(lambda: torch.neg(tiny, out=tiny), inner=100)
    return {"points": points, "host": host_seconds(device, repeats)}


def described(found: dict[str, Any], device: str) -> dict[str, Any]:
    """The file: of a GPU all that ``--gpu`` needs, of a CPU its `device` table."""
    points = found["points"]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"

    def by_size(rows: list[list[Any]]) -> list[list[float]]:
        return [list(point) for point in curve((row[-2], row[-1]) for row in rows).points]

    achieved: dict[str, Any] = {
        "basis": f"rates measured on {name} ({time.strftime('%Y-%m-%d')}, torch {torch.__version__})",
        "memory": by_size(points["copies"]),
        "matmul": {dtype: by_size(rows) for dtype, rows in points["matmul"].items()},
    }
    for way, key in (("forward", "attention"), ("backward", "attention_backward")):
        achieved[key] = {
            dtype: by_size([row for row in rows if row[0] == way]) for dtype, rows in points["attention"].items()
        }
    fastest = {dtype: max(rate for _, rate in rows) for dtype, rows in achieved["matmul"].items()}
    known = next((gpu for gpu in GPUS.values() if gpu.name == name), None)
    if known is not None:
        values = device_values(known.device)
    else:
        sizes = {"2": fastest.get("bfloat16"), "4": fastest.get("tf32", fastest["float32"])}
        values = {
            "peak": {size: rate for size, rate in sizes.items() if rate is not None},
            "memory": max(rate for _, rate in achieved["memory"]),
            "launch": points["launch"],
            **({"exact": fastest["float32"]} if "tf32" in fastest else {}),
        }
    file: dict[str, Any] = {"name": name, "device": {**values, "achieved": achieved}}
    if device == "cuda":
        this = torch.cuda.get_device_properties()
        file |= {
            "capability": f"{this.major}.{this.minor}",
            "multiprocessors": this.multi_processor_count,
            "bytes": this.total_memory,
            "shared_memory": this.shared_memory_per_block_optin,
            "l2": this.L2_cache_size,
            "registers": this.regs_per_multiprocessor,
            "threads": this.max_threads_per_multi_processor,
        }
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="FILE.json", required=True)
    parser.add_argument("--points", metavar="FILE.json", help="what was measured of each shape, and of the host")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--largest", type=int, default=1 << 32, help="bytes of the largest copy, read and written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    found = measure(args.device, args.repeats, args.largest)
    dist.destroy_process_group()
    pathlib.Path(args.save).write_text(json.dumps(described(found, args.device), indent=1))
    if args.points:
        pathlib.Path(args.points).write_text(json.dumps(found, indent=1))
    console, points = Console(width=110), found["points"]
    for name, rows in points["matmul"].items():
        table = Table("m", "k", "n", "Tflop/s", title=f"matmul, {name}")
        for m, k, n, _, rate in rows:
            table.add_row(str(m), str(k), str(n), f"{rate / 1e12:.2f}")
        console.print(table)
    for name, rows in points["attention"].items():
        table = Table("", "shape", "Tflop/s", title=f"attention, {name}")
        for way, *shape, _, rate in rows:
            table.add_row(way, str(shape), f"{rate / 1e12:.2f}")
        console.print(table)
    table = Table("KiB", "GB/s", title="copies")
    for size, rate in points["copies"]:
        table.add_row(f"{size / 1024:.0f}", f"{rate / 1e9:.0f}")
    console.print(table)
    table = Table("host", "us")
    for name, seconds in found["host"].items():
        table.add_row(name, f"{seconds * 1e6:.1f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
