"""A training step on one GPU: NCCL with one rank, and several ranks that share the GPU.

    python tools/bench/gpu.py [--layouts tp fsdp fully_shard fully_shard_tp] [--ranks 1 2 4] [--layers 4] [--dim 1024]
    [--sequence 128] [--dtype float32] [--repeats 15] [--once] [--json FILE] [--check-on-cpu]

One table for each number of ranks and layout. With one rank the backend is NCCL: all code paths, streams and events,
nothing sent. With more it is `staged_group`: kernels of several ranks on real data, for their numbers and memory;
collectives block the host there, so that times say nothing. Jobs compile side by side, as many as there are cores for,
and take turns on the GPU for what is measured. Rows, by the names under which `docs/gpu.md` keeps them:

    loss, gradient   largest difference from eager, relative (gradient: to the largest value of its parameter);
                     `--steps` AdamW steps
    compile          seconds of the first forward and backward beyond a later one, with empty caches beside other jobs
    step             ms of forward and backward, median of steps in which the variants take turns
    memory           MiB, peak of what torch allocated in a step beyond what it held before
    triton, other    kernels of a step, by the profiler: Triton's, and those of libraries and of torch
    copied           MB that the device copies to and from the host in a step, by the profiler
    busy, idle       ms of a step in which a kernel runs, and in which none does, by the profiler; `busy` also as
                     predicted by the report

Variants: eager, stock (left out, with its error, where it cannot compile the layout), ours, with ``--once`` ours with
equal blocks compiled once, and with one rank ours with CUDA graphs (``mode="reduce-overhead"``). A layout is left out
for numbers of ranks that it does not fit (2-D ones need 1 or 4). The file has each variant's kernels, too, with their
numbers and ms. Where there is no GPU the exit status is 2; `--check-on-cpu` tries the program without one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import staged_group
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Run, Trainer, gradient_difference, loss_difference
from dtensor_compile.recording.recorder import record
from dtensor_compile.report.build import build_side
from dtensor_compile.topology.gpus import GPUS
from dtensor_compile.topology.links import CLUSTERS, Cluster

ROWS = ("loss", "gradient", "compile", "step", "memory", "triton", "other", "copied", "busy", "idle")


def topology(device: str) -> Cluster:
    """The GPU that is there, with the links between its like."""
    if device == "cpu":
        return CLUSTERS["cpu-loopback"]
    known = [gpu for gpu in GPUS.values() if gpu.name.split()[1].split("-")[0] in torch.cuda.get_device_name()]
    link = CLUSTERS["h100"].inside
    return Cluster("shared gpu", 0, link, link, (known or [GPUS["h100"]])[0].device, backend=dist.get_backend())


def variants(cluster: Cluster, graphs: bool, once: bool) -> dict[str, Callable[[Any], Any]]:
    def ours(model: Any, **options: Any) -> Any:
        return torch.compile(model, backend="dtensor", fullgraph=True, options={"topology": cluster, **options})

    found: dict[str, Callable[[Any], Any]] = {
        "eager": lambda model: model,
        "stock": lambda model: torch.compile(model, backend="inductor"),
        "ours": ours,
    }
    if once:
        found["once"] = lambda model: ours(model, blocks="once")
    if graphs:
        from dtensor_compile.compat.inductor.compile import mode_options

        found["graphs"] = lambda model: ours(model, **mode_options("reduce-overhead"))
    return found


def measure(args: argparse.Namespace, device: str, layout_name: str, turns: Turns) -> dict[str, dict[str, Any]]:
    """Row -> variant -> figure, on this rank. Called on all ranks."""
    layout, world = LAYOUTS[layout_name], dist.get_world_size()
    mesh = init_device_mesh(device, layout.mesh_shape(world), mesh_dim_names=layout.dims)
    heads = max(8, args.dim // 128)
    config = LlamaConfig(
        layers=args.layers, dim=args.dim, ffn_dim=3 * args.dim, heads=heads, kv_heads=heads // 2, sequence=args.sequence
    )
    cluster = topology(device)
    found: dict[str, dict[str, Any]] = {row: {} for row in (*ROWS, "kernels")}
    trainers, runs = {}, {}
    for name, wrap in variants(cluster, world == 1 and device == "cuda", args.once).items():
        with record() if name == "ours" else contextlib.nullcontext() as recording:
            trainer = Trainer(layout, mesh, config, args.steps, wrap)
            began = time.perf_counter()
            try:
                with fresh_caches():
                    run = Run(name, losses=[_loss(trainer, 0)], gradients=trainer.gradients())
            except Exception as error:
                if name != "stock":
                    raise
                print(f"{layout_name}: stock fails, and is left out: {' '.join(str(error).split())[:200]}", flush=True)
                continue
            found["compile"][name] = time.perf_counter() - began
        trainers[name], runs[name] = trainer, run
        trainer.optimizer.step()
        run.losses += [trainer.step(index) for index in range(1, args.steps)]
        found["loss"][name] = loss_difference(run, runs["eager"])
        found["gradient"][name] = gradient_difference(run, runs["eager"])
        if recording is not None:
            graphs = build_side(recording, cluster, name).graphs
            found["busy"]["predicted"] = 1e3 * sum(graph.compute_seconds for graph in graphs)
    with turns.mine():
        times: dict[str, list[float]] = {name: [] for name in trainers}
        for turn in range(args.repeats):
            names = list(
                trainers
            )  # each goes first in its turn: one that leaves the GPU idle lets it cool for the next
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                trainer = trainers[name]
                with _peak(device, found["memory"], name):
                    times[name].append(_seconds(trainer, device))
        found["step"] = {name: 1e3 * statistics.median(values) for name, values in times.items()}
        for name, milliseconds in found["step"].items():
            found["compile"][name] -= milliseconds / 1e3
        if device == "cuda":
            for name, trainer in trainers.items():
                _profile(trainer, found, name)
    return found


class Turns:
    """Jobs compile side by side; while one measures, the others wait. A lock of the machine, held by rank 0.

    Compiling holds it shared, so that nobody measures beside it.
    """

    def __init__(self, rank: int) -> None:
        file = pathlib.Path(tempfile.gettempdir(), "dtensor_compile-gpu-bench.lock")
        self.file = file.open("w") if rank == 0 else None  # held until the process ends
        self._lock(fcntl.LOCK_SH)

    def _lock(self, how: int) -> None:
        if self.file is not None:
            fcntl.flock(self.file, how)

    @contextlib.contextmanager
    def mine(self) -> Iterator[None]:
        """Called on all ranks of a job."""
        self._lock(fcntl.LOCK_UN)
        self._lock(fcntl.LOCK_EX)
        dist.barrier()
        try:
            yield
        finally:
            dist.barrier()
            self._lock(fcntl.LOCK_UN)


def _loss(trainer: Trainer, index: int) -> float:
    loss = trainer.loss(index)
    loss.backward()
    return loss.item()


def _seconds(trainer: Trainer, device: str) -> float:
    trainer.optimizer.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    trainer.loss(0).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


@contextlib.contextmanager
def _peak(device: str, row: dict[str, float], name: str) -> Any:
    if device == "cpu":
        yield
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    row[name] = (torch.cuda.max_memory_allocated() - before) / 2**20


def _profile(trainer: Trainer, found: dict[str, dict[str, Any]], name: str) -> None:
    """Kernels, copies and idle time of one step."""
    step = profiled(lambda: _seconds(trainer, "cuda"))
    by_kernel = found["kernels"][name] = step.pop("by_kernel")
    for row, figure in step.items():
        found[row][name] = figure
    found["triton"][name] = sum(count for kernel, (count, _) in by_kernel.items() if kernel.startswith("triton_"))
    found["other"][name] = sum(count for count, _ in by_kernel.values()) - found["triton"][name]


def seconds(step: Callable[[], Any]) -> float:
    """Seconds of a step, from an idle GPU to an idle GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """ms of a step in which a kernel runs (``busy``) and in which none does (``idle``), MB copied to and from the host
    (``copied``), and for each name of a kernel their number and ms (``by_kernel``)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    path = f"/tmp/gpu-bench-{os.getpid()}.json"
    profiler.export_chrome_trace(path)
    events = [event for event in json.loads(pathlib.Path(path).read_text())["traceEvents"] if event.get("ph") == "X"]
    os.remove(path)
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and re.search("DtoH|HtoD", event["name"])]
    found: dict[str, Any] = {"copied": sum(event["args"].get("bytes", 0) for event in copies) / 1e6, "by_kernel": {}}
    busy, end = 0.0, 0.0
    for event in kernels:
        start, stop = max(event["ts"], end), event["ts"] + event["dur"]
        busy, end = busy + max(0.0, stop - start), max(end, stop)
        count, milliseconds = found["by_kernel"].get(event["name"], (0, 0.0))
        found["by_kernel"][event["name"]] = (count + 1, milliseconds + event["dur"] / 1e3)
    if kernels:
        found["busy"], found["idle"] = busy / 1e3, (end - kernels[0]["ts"] - busy) / 1e3
    return found


def rank_main(rank: int, world: int, layout: str, device: str, folder: str, args: argparse.Namespace) -> None:
    """One process of a job, which finds the others by `folder`; rank 0 leaves the figures there."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    turns = Turns(rank)
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, args.dtype))
    staged_group.register()
    backend = "nccl" if world == 1 and device == "cuda" else staged_group.NAME
    name = f"{layout}-{world}"
    dist.init_process_group(backend, init_method=f"file://{folder}/{name}.store", rank=rank, world_size=world)
    try:
        found = measure(args, device, layout, turns)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        pathlib.Path(folder, f"{name}.json").write_text(json.dumps(found))


def run(jobs: list[tuple[int, str]], device: str, args: argparse.Namespace) -> Iterator[tuple[int, str, Any]]:
    """Ranks, layout and figures of each job, as soon as it is over; an error of it in place of figures."""
    cores = len(os.sched_getaffinity(0))
    while jobs:
        batch = [jobs.pop(0)]
        while jobs and sum(world for world, _ in batch) + jobs[0][0] <= cores:
            batch.append(jobs.pop(0))
        with tempfile.TemporaryDirectory() as folder:
            contexts = [
                torch.multiprocessing.spawn(rank_main, (world, layout, device, folder, args), nprocs=world, join=False)
                for world, layout in batch
            ]
            for (world, layout), context in zip(batch, contexts):
                try:
                    while not context.join():
                        pass
                    yield world, layout, json.loads(pathlib.Path(folder, f"{layout}-{world}.json").read_text())
                except (
                    torch.multiprocessing.ProcessExitedException,
                    torch.multiprocessing.ProcessRaisedException,
                ) as error:
                    yield world, layout, error


def table(layout: str, world: int, device: str, found: dict[str, dict[str, Any]]) -> Table:
    names = [
        name
        for name in ("eager", "stock", "ours", "once", "graphs", "predicted")
        if any(name in found[row] for row in ROWS)
    ]
    backend = "nccl" if world == 1 and device == "cuda" else staged_group.NAME
    result = Table(title=f"{LAYOUTS[layout].title}, {world} rank{'s' * (world > 1)}, {backend}")
    for column in ("", *names):
        result.add_column(column, justify="right")
    for row in ROWS:
        if found[row].keys() - {"predicted"}:
            result.add_row(row, *(f"{found[row][name]:.3g}" if name in found[row] else "" for name in names))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=LlamaConfig.sequence)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of parameters and batches")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--once", action="store_true", help="also with equal blocks compiled once")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check-on-cpu", action="store_true", help="without a GPU: try the program on the CPU")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.check_on_cpu:
        print(
            "gpu: there is no GPU (torch.cuda.is_available() is false); --check-on-cpu tries the program without",
            file=sys.stderr,
        )
        return 2
    device = "cpu" if args.check_on_cpu else "cuda"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}")
    jobs = [(w, layout) for w in args.ranks for layout in args.layouts if len(LAYOUTS[layout].dims) == 1 or w in (1, 4)]
    everything: dict[int, dict[str, Any]] = {}
    failed = False
    for world, layout, found in run(jobs, device, args):
        if isinstance(found, Exception):
            print(f"{layout}, {world} ranks: {found}", file=sys.stderr)
            failed = True
            continue
        Console(width=120).print(table(layout, world, device, found))
        everything.setdefault(world, {})[layout] = found
        if args.json:  # after each job, so that a run that is cut short leaves what it has
            pathlib.Path(args.json).write_text(
                json.dumps({"device": name, "torch": torch.__version__, "ranks": everything}, indent=1)
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
