"""What a report costs, on a simulated job in one process: against compiling the same step, and on 512 ranks against 8.

    python tools/bench/report_time.py [--repeats 3]

The first figure is the time of the whole report of the example (this backend, stock, analysis, tables and JSON) over
that of compiling its forward and backward with ``backend="dtensor"`` and empty caches. The second is the time of a
report on a mesh of 256 x 2 ranks over that on 4 x 2, without stock, whose graphs grow with the mesh. Wall time and CPU
time; kernels are compiled in this process.
"""

from __future__ import annotations

import argparse
import io
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import tensor_parallel, two_dim
from dtensor_compile.report.model import to_json
from dtensor_compile.report.recorded import run_backward
from dtensor_compile.report.run_target import Job, report_target, running
from dtensor_compile.report.table import console_for, print_report

LAYERS = 4


def on_one_dim(mesh: DeviceMesh) -> tuple[Any, ...]:
    """The example: tensor and sequence parallel."""
    return tensor_parallel(Llama(LlamaConfig(layers=LAYERS)), mesh), torch.zeros(4, 128, dtype=torch.long)


def on_two_dims(mesh: DeviceMesh) -> tuple[Any, ...]:
    """The example on a 2-D mesh, with a dim that 256 ranks can share."""
    config = LlamaConfig(layers=LAYERS, dim=512, ffn_dim=1024, heads=8, kv_heads=4)
    return two_dim(Llama(config), mesh), torch.zeros(1, 128, dtype=torch.long)


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call, those of processes that it starts included."""

    def cpu() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    began = time.perf_counter(), cpu()
    run()
    return time.perf_counter() - began[0], cpu() - began[1]


def compile_step(world: int) -> None:
    """Compiles forward and backward of the example with Inductor, as a program does."""
    from torch.distributed.device_mesh import init_device_mesh

    counters.reset()
    with running(Job(world=world)), fresh_caches():
        model, tokens = on_one_dim(init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
        run_backward(torch.compile(model, backend="dtensor", options={"compile_threads": 1})(tokens))


def report(function: Callable[..., Any], mesh: tuple[tuple[str, int], ...], *, stock: bool) -> None:
    """The whole of ``dtensor-compile report``, on a function of this file."""
    with fresh_caches():
        made = report_target(f"{__file__}:{function.__name__}", job=Job(mesh=mesh), stock=stock)
    print_report(made, console_for(io.StringIO()))
    to_json(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    runs: dict[str, Callable[[], object]] = {
        "compile, 2 ranks": lambda: compile_step(2),
        "report, 2 ranks": lambda: report(on_one_dim, (("tp", 2),), stock=True),
        "report, 4x2 ranks": lambda: report(on_two_dims, (("dp", 4), ("tp", 2)), stock=False),
        "report, 256x2 ranks": lambda: report(on_two_dims, (("dp", 256), ("tp", 2)), stock=False),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(args.repeats + 1):
        for name, run in runs.items():
            wall, cpu = measured(run)
            print(
                f"repeat {repeat}: {name}: wall {wall:.1f} s, CPU {cpu:.1f} s" + ("" if repeat else " (warms up)"),
                flush=True,
            )
            if repeat:
                seconds[name].append((wall, cpu))
    medians = {name: [statistics.median(v) for v in zip(*values)] for name, values in seconds.items()}
    table = Table("", "wall", "CPU", title=f"cost of a report, Llama {LAYERS} layers, median of {args.repeats}")
    for name, (wall, cpu) in medians.items():
        table.add_row(name, f"{wall:.1f} s", f"{cpu:.1f} s")
    for title, a, b in (
        ("report / compile", "report, 2 ranks", "compile, 2 ranks"),
        ("512 ranks / 8 ranks", "report, 256x2 ranks", "report, 4x2 ranks"),
    ):
        table.add_row(title, *(f"{medians[a][i] / medians[b][i]:.2f}" for i in range(2)))
    Console().print(table)


if __name__ == "__main__":
    main()
