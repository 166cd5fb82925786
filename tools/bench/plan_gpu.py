"""What ``dtensor-compile plan`` forecasts for a GPU, against what the same programs need on one.

    python tools/bench/plan_gpu.py --measure measured.json    # on the GPU
    python tools/bench/plan_gpu.py --forecast plans.json      # anywhere: for an emulated H100 (``--gpu``)
    python tools/bench/plan_gpu.py --compare plans.json measured.json

Programs are Llamas in a job of one rank, so that collectives are there and send nothing. Each makes training steps
(forward, loss, backward, clipping, AdamW) compiled by this backend; measured are the median of a step, the peak of what
torch allocated and reserved in one, by the profiler the time in which kernels run, and how many ms the host needs for
each part of a step (``host``; where the GPU is behind, it waits at the end alone). Programs compile side by side and
take turns on the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu import Turns, profiled, seconds
from plan_memory import spread
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.forecast.forecast import make_plan
from dtensor_compile.forecast.step_plan import StepPlan, from_json, to_json
from dtensor_compile.forecast.training import StepSettings
from dtensor_compile.report.run_target import Job

LARGE = LlamaConfig(layers=2, dim=4096, ffn_dim=14336, heads=32, kv_heads=8, vocab=32768, sequence=2048)
MEDIUM = LlamaConfig(layers=4, dim=1024, ffn_dim=3072, heads=8, kv_heads=4, vocab=32768, sequence=1024)
SMALL = LlamaConfig(layers=4, dim=256, ffn_dim=768, heads=4, kv_heads=4, vocab=1024, sequence=128)
CONFIGS = {"large": LARGE, "medium": MEDIUM, "small": SMALL}


@dataclasses.dataclass(frozen=True)
class Program:
    """A Llama on a mesh of one rank with these dims."""

    dims: tuple[str, ...]
    config: str = "large"
    dtype: str = "bfloat16"
    mixed: bool = False
    checkpointed: bool = False
    batch: int = 2

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, 1) for name in self.dims)


PROGRAMS = {
    "tensor parallel": Program(("tp",)),
    "fully_shard": Program(("dp",)),
    "fully_shard x tensor parallel": Program(("dp", "tp")),
    "fully_shard, checkpointed": Program(("dp",), checkpointed=True),
    "fully_shard, mixed precision": Program(("dp",), dtype="float32", mixed=True),
    "fully_shard x tensor parallel, float32": Program(("dp", "tp"), "medium", "float32"),
    "fully_shard, small": Program(("dp",), "small"),
}
SETTINGS = StepSettings("cross_entropy", "adamw", 1.0)


def build(mesh: DeviceMesh, name: str) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The target of the plan."""
    program = PROGRAMS[name]
    config = CONFIGS[program.config]
    with torch.device(mesh.device_type):
        model: nn.Module = Llama(config).to(getattr(torch, program.dtype))
        tokens = torch.zeros(program.batch, config.sequence, dtype=torch.long)
    return spread(model, mesh, program.mixed, program.checkpointed), (tokens,)


def forecast(name: str, gpu: str) -> StepPlan:
    warnings.simplefilter("ignore")
    job = Job(PROGRAMS[name].mesh)
    return make_plan(f"{__file__}:build", job, gpu=gpu, settings=SETTINGS, arguments={"name": name})


def measure(name: str, folder: str, repeats: int) -> dict[str, Any]:
    """Figures of a program, on the GPU that is there; `folder` is where this process finds itself."""
    warnings.simplefilter("ignore")
    program, turns = PROGRAMS[name], Turns(0)
    store = f"file://{folder}/{list(PROGRAMS).index(name)}.store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        mesh = init_device_mesh("cuda", (1,) * len(program.dims), mesh_dim_names=program.dims)
        model, (tokens,) = build(mesh, name)
        config = CONFIGS[program.config]
        tokens.random_(config.vocab)  # matmuls of equal rows need less power, and are faster
        targets = tokens.flatten().roll(-1)
        run = torch.compile(model, backend="dtensor", fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters())

        host: dict[str, list[float]] = {}

        def step() -> None:
            at = time.perf_counter()

            def issued(part: str) -> None:
                nonlocal at
                host.setdefault(part, []).append(1e3 * (time.perf_counter() - at))
                at = time.perf_counter()

            logits = run(tokens).flatten(0, -2)
            loss = F.cross_entropy(logits, targets)
            del logits  # as in the forecast, nobody holds them for the backward pass
            issued("forward")
            loss.backward()
            issued("backward")
            nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip)
            issued("clipping")
            optimizer.step()
            optimizer.zero_grad()
            issued("optimizer")

        began = time.perf_counter()
        step()
        compile_seconds = time.perf_counter() - began
        with turns.mine():
            for _ in range(2):
                step()
            host.clear()
            times = [seconds(step) for _ in range(repeats)]
            parts = {part: statistics.median(values) for part, values in host.items()}
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            kernels = profiled(step)
        return {
            "name": name,
            "step": statistics.median(times),
            "peak": peak,
            "reserved": reserved,
            "busy": kernels["busy"],
            "idle": kernels["idle"],
            "host": parts,
            "by_kernel": kernels["by_kernel"],
            "compile": compile_seconds,
        }
    finally:
        dist.destroy_process_group()


def table(rows: list[dict[str, Any]], plans: dict[str, StepPlan], title: str) -> Table:
    result = Table(title=title)
    result.add_column("program")
    for column in (
        "peak MiB",
        "forecast",
        "",
        "reserved",
        "forecast",
        "",
        "busy ms",
        "forecast",
        "",
        "step ms",
        "forecast",
        "",
    ):
        result.add_column(column, justify="right")
    for row in rows:
        plan = plans[row["name"]]
        pairs = (
            (row["peak"] / 2**20, (plan.memory.peak + plan.memory.fixed) / 2**20),
            (row["reserved"] / 2**20, plan.memory.needed / 2**20),
            (row["busy"], plan.time.compute * 1e3),
            (row["step"] * 1e3, plan.time.step * 1e3),
        )
        cells = [
            text for is_, planned in pairs for text in (f"{is_:,.1f}", f"{planned:,.1f}", f"{planned / is_ - 1:+.1%}")
        ]
        result.add_row(row["name"], *cells)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--forecast", metavar="FILE", help="write the plans there")
    what.add_argument("--measure", metavar="FILE", help="write there what this machine's GPU needs")
    what.add_argument("--compare", nargs=2, metavar=("PLANS", "MEASURED"), help="print both, of these files")
    parser.add_argument("--gpu", default="h100", metavar="NAME|FILE", help="that of the forecast")
    parser.add_argument("--only", default="", help="programs with this text in their names")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    names = [name for name in PROGRAMS if args.only in name]
    if args.compare:
        plans, measured = (json.loads(pathlib.Path(file).read_text()) for file in args.compare)
        found = {name: from_json(json.dumps(plan)) for name, plan in plans.items()}
        Console(width=170).print(
            table([row for row in measured["rows"] if row["name"] in names], found, measured["on"])
        )
        return 0
    context = multiprocessing.get_context("spawn")
    if args.forecast:
        with context.Pool(min(len(names), len(os.sched_getaffinity(0))), maxtasksperchild=1) as pool:
            texts = dict(zip(names, map(to_json, pool.map(functools.partial(forecast, gpu=args.gpu), names, 1))))
        pathlib.Path(args.forecast).write_text(json.dumps({name: json.loads(text) for name, text in texts.items()}))
        return 0
    if not torch.cuda.is_available():
        print("plan_gpu: there is no GPU (torch.cuda.is_available() is false)", file=sys.stderr)
        return 2
    rows, failed = [], False
    on = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    with tempfile.TemporaryDirectory() as folder, context.Pool(len(names), maxtasksperchild=1) as pool:
        for name, job in [(name, pool.apply_async(measure, (name, folder, args.repeats))) for name in names]:
            try:
                rows.append(job.get())
            except Exception as error:  # the other programs' figures are wanted all the same
                print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:600]}", file=sys.stderr)
                failed = True
            pathlib.Path(args.measure).write_text(json.dumps({"on": on, "rows": rows}, indent=1))
    for row in rows:
        print({key: value for key, value in row.items() if key != "by_kernel"})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
