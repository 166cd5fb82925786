"""Compile time of a training step for an emulated GPU against that for the CPU: same model, same simulated job, empty
caches, in turns.

    python tools/bench/emulated_compile.py [--layers 4] [--repeats 3] [--layout tp] [--gpu h200] [--json FILE]

Each measurement is the first forward and backward less the second in a process of its own, through this backend, with
the kernels: C++ and its compiler, or Triton, PTX and cubin. Kernels are compiled in one thread, so that all their time
is counted."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Mapping
from typing import Any

import torch
from compile_time import Measured, _cpu_seconds, arguments, medians_of, report

from dtensor_compile import offline
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Trainer
from dtensor_compile.testing import make_mesh


def first_step(
    layout_name: str, layers: int, ranks: int, gpu: str | None, options: Mapping[str, Any] | None = None
) -> tuple[float, float, int]:
    """Wall and CPU seconds of the first step less those of the second, and the number of Triton kernels.

    Args:
        gpu: a card to emulate; None for the CPU.
        options: of the backend.
    """
    layout = LAYOUTS[layout_name]

    def wrap(model: torch.nn.Module) -> Any:
        with_options = {"compile_threads": 1, **(options or {})}
        return torch.compile(model, backend="dtensor", fullgraph=True, options=with_options)

    with contextlib.ExitStack() as stack:
        for scope in (fresh_caches(), offline.job(ranks)):
            stack.enter_context(scope)
        device = stack.enter_context(offline.device(gpu)) if gpu else None
        mesh = make_mesh(layout.mesh_shape(ranks), layout.dims, "cuda" if gpu else "cpu")
        trainer = Trainer(layout, mesh, LlamaConfig(layers=layers), 1, wrap)
        wall, cpu = [], []
        for _ in range(2):
            began = time.perf_counter(), _cpu_seconds()
            trainer.loss(0).backward()
            wall.append(time.perf_counter() - began[0])
            cpu.append(_cpu_seconds() - began[1])
        return wall[0] - wall[1], cpu[0] - cpu[1], len(device.kernels) if device else 0


def main() -> None:
    args = arguments(__doc__, repeats=3, gpu="h200")
    measured: Measured = {"cpu": [], args.gpu: []}
    for repeat in range(args.repeats):
        for name, values in measured.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                wall, cpu, kernels = pool.apply(
                    first_step, (args.layout, args.layers, args.ranks, None if name == "cpu" else name)
                )
            print(
                f"repeat {repeat}: {name} wall {wall:.1f} s, CPU {cpu:.1f} s"
                + (f", {kernels} kernels" if kernels else ""),
                flush=True,
            )
            values.append((wall, cpu))
    medians = medians_of(measured)
    rows = {what: (medians["cpu"][i], medians[args.gpu][i]) for i, what in enumerate(("wall time", "CPU time"))}
    report(args, "compile time", rows, ("cpu", args.gpu), measured)


if __name__ == "__main__":
    main()
