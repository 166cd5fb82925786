"""A training step on one GPU: NCCL with one rank, and several ranks that share the GPU over gloo.

    python tools/bench/gpu.py [--layouts tp fsdp fully_shard fully_shard_tp] [--ranks 1 2 4] [--layers 4] [--dim 1024]
    [--sequence 128] [--dtype float32] [--repeats 15] [--json FILE] [--check-on-cpu]

One table for each number of ranks. With one rank the backend is NCCL: all code paths, streams and events, nothing sent.
With more it is gloo over CUDA tensors: staging and transfer beside kernels. Rows, by the names under which
`docs/gpu.md` keeps them:

    loss, gradient   largest difference from eager, relative (gradient: to the largest value of its parameter);
                     `--steps` AdamW steps
    step             ms of forward and backward, median of steps in which the variants take turns
    memory           MiB, peak of what torch allocated in a step beyond what it held before
    triton, other    kernels of a step, by the profiler: Triton's, and those of libraries and of torch
    copied           MB that the device copies to and from the host in a step, by the profiler
    busy, idle       ms of a step in which a kernel runs, and in which none does, by the profiler; `busy` also as
                     predicted by the report
    compute          ms of the same step with collectives that return at once
    exposed          ms: predicted for the device and for the link that was measured; measured in waits; step beyond
                     compute

Variants: eager, stock (left out, with its error, where it cannot compile the layout), ours, and with one rank ours with
CUDA graphs (``mode="reduce-overhead"``). A 2-D layout needs 1 or 4 ranks. Where there is no GPU the exit status is 2;
`--check-on-cpu` runs what does not need one, over gloo, to try the program.
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
from overlap import Waits
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from dtensor_compile import offline
from dtensor_compile.demo.llama import LlamaConfig
from dtensor_compile.demo.train import LAYOUTS, Run, Trainer, gradient_difference, loss_difference
from dtensor_compile.recording.recorder import record
from dtensor_compile.report.build import build_side
from dtensor_compile.topology.gpus import GPUS
from dtensor_compile.topology.links import CLUSTERS, Cluster

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import measure_links  # noqa: E402 - tools beside this one

ROWS = ("loss", "gradient", "step", "memory", "triton", "other", "copied", "busy", "idle", "compute", "exposed")


def topology(device: str) -> Cluster:
    """The GPU that is there, and the link between the ranks that share it. Called on all ranks."""
    if device == "cpu":
        return dataclasses.replace(CLUSTERS["cpu-loopback"], inside=measure_links.measure_link(), name="cpu")
    known = [gpu for gpu in GPUS.values() if gpu.name.split()[1].split("-")[0] in torch.cuda.get_device_name()]
    link = CLUSTERS["h100"].inside if dist.get_world_size() == 1 else _link_over_gloo()
    return Cluster("shared gpu", 0, link, link, (known or [GPUS["h100"]])[0].device, backend=dist.get_backend())


def _link_over_gloo() -> Any:
    """The link that gloo makes of staging and loopback."""
    n, times = dist.get_world_size(), []
    for elements in (1 << 10, 1 << 22):
        x, out = torch.ones(elements, device="cuda"), torch.empty(n * elements, device="cuda")

        def gather(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            dist.all_gather_into_tensor(out, x)
            torch.cuda.synchronize()

        times.append((4.0 * (n - 1) * elements, measure_links.seconds_of(gather, 9)))
    return measure_links.fit(times[1], times[0], 1)


def variants(cluster: Cluster, graphs: bool) -> dict[str, Callable[[Any], Any]]:
    def ours(model: Any, **options: Any) -> Any:
        return torch.compile(model, backend="dtensor", fullgraph=True, options={"topology": cluster, **options})

    found: dict[str, Callable[[Any], Any]] = {
        "eager": lambda model: model,
        "stock": lambda model: torch.compile(model, backend="inductor"),
        "ours": ours,
    }
    if graphs:
        from dtensor_compile.compat.inductor.compile import mode_options

        found["graphs"] = lambda model: ours(model, **mode_options("reduce-overhead"))
    return found


def model_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(layers=args.layers, dim=args.dim, ffn_dim=3 * args.dim, sequence=args.sequence)


def measure(args: argparse.Namespace, device: str, layout_name: str) -> dict[str, dict[str, float]]:
    """Row -> variant -> figure, on this rank. Called on all ranks."""
    layout, world = LAYOUTS[layout_name], dist.get_world_size()
    mesh = init_device_mesh(device, layout.mesh_shape(world), mesh_dim_names=layout.dims)
    config = model_config(args)
    cluster = topology(device) if world > 1 or device == "cuda" else CLUSTERS["cpu-loopback"]
    found: dict[str, dict[str, float]] = {row: {} for row in ROWS}
    trainers, runs = {}, {}
    for name, wrap in variants(cluster, world == 1 and device == "cuda").items():
        torch.manual_seed(0)
        with record() if name == "ours" else contextlib.nullcontext() as recording:
            trainer = Trainer(layout, mesh, config, args.steps, wrap)
            try:
                run = Run(name, losses=[_loss(trainer, 0)], gradients=trainer.gradients())
            except Exception as error:
                if name != "stock":
                    raise
                torch.compiler.reset()  # what failed is marked as not to be compiled, for other backends too
                print(f"{layout_name}: stock fails, and is left out: {' '.join(str(error).split())[:200]}", flush=True)
                continue
            trainers[name], runs[name] = trainer, run
        trainer.optimizer.step()
        run.losses += [trainer.step(index) for index in range(1, args.steps)]
        found["loss"][name] = loss_difference(run, runs["eager"])
        found["gradient"][name] = gradient_difference(run, runs["eager"])
        if recording is not None:
            kernels = [d for d in recording.decisions if d.kind == "schedule_kernels" and not d.left_alone]
            found["exposed"]["predicted"] = sum(float(d.after.split()[0]) for d in kernels)
            found["busy"]["predicted"] = 1e3 * sum(
                g.compute_seconds for g in build_side(recording, cluster, name).graphs
            )
    waited = []
    for _ in range(args.repeats):
        for name, trainer in trainers.items():
            with _peak(device, found["memory"], name), Waits() as waits:
                found["step"].setdefault(name, []).append(_seconds(trainer, device))  # type: ignore[arg-type, union-attr]
            waited += [waits.seconds] if name == "ours" else []
    found["step"] = {name: 1e3 * statistics.median(values) for name, values in found["step"].items()}  # type: ignore[arg-type]
    found["exposed"]["in waits"] = 1e3 * statistics.median(waited)
    if device == "cuda":
        for name, trainer in trainers.items():
            _profile(trainer, found, name)
    return found


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


def _profile(trainer: Trainer, found: dict[str, dict[str, float]], name: str) -> None:
    """Kernels, copies and idle time of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _seconds(trainer, "cuda")
    path = f"/tmp/gpu-bench-{os.getpid()}.json"
    profiler.export_chrome_trace(path)
    events = [event for event in json.loads(pathlib.Path(path).read_text())["traceEvents"] if event.get("ph") == "X"]
    os.remove(path)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and re.search("DtoH|HtoD", event["name"])]
    busy, end = 0.0, 0.0
    for event in sorted(kernels, key=lambda event: event["ts"]):
        start, stop = max(event["ts"], end), event["ts"] + event["dur"]
        busy, end = busy + max(0.0, stop - start), max(end, stop)
    if kernels:
        whole = max(event["ts"] + event["dur"] for event in kernels) - min(event["ts"] for event in kernels)
        found["busy"][name], found["idle"][name] = busy / 1e3, (whole - busy) / 1e3
    found["triton"][name] = sum(event["name"].startswith("triton_") for event in kernels)
    found["other"][name] = len(kernels) - found["triton"][name]
    found["copied"][name] = sum(event["args"].get("bytes", 0) for event in copies) / 1e6


def compute_alone(args: argparse.Namespace, device: str, layout_name: str, world: int) -> float:
    """Milliseconds of a step whose collectives return at once: one rank, the others in name only."""
    layout = LAYOUTS[layout_name]
    config = model_config(args)
    with offline.job(world):
        mesh = init_device_mesh(device, layout.mesh_shape(world), mesh_dim_names=layout.dims)
        trainer = Trainer(
            layout, mesh, config, 1, lambda model: torch.compile(model, backend="dtensor", fullgraph=True)
        )
        return 1e3 * statistics.median([_seconds(trainer, device) for _ in range(args.repeats + 1)][1:])


def rank_main(rank: int, world: int, file: str, device: str, args: argparse.Namespace, results: Any) -> None:
    """One process of a job, which meets the others at `file` and ends with ``layout -> figures`` of rank 0 in
    `results`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, args.dtype))
    backend = "nccl" if world == 1 and device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        found = {layout: measure(args, device, layout) for layout in args.layouts}
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        for layout in args.layouts if world > 1 else ():
            alone = compute_alone(args, device, layout, world)
            found[layout]["compute"]["ours"] = alone
            found[layout]["exposed"]["beyond compute"] = found[layout]["step"]["ours"] - alone
        results.put(found)


def run(world: int, device: str, args: argparse.Namespace) -> dict[str, Any]:
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, f"{folder}/store", device, args, results)
        torch.multiprocessing.spawn(rank_main, arguments, nprocs=world)
    return results.get()  # type: ignore[no-any-return]


def table(layout: str, world: int, device: str, found: dict[str, dict[str, float]]) -> Table:
    names = [name for name in ("eager", "stock", "ours", "graphs") if name in found["step"]]
    names += ["predicted"] if "predicted" in found["busy"] else []
    backend = "nccl" if world == 1 and device == "cuda" else "gloo"
    result = Table(title=f"{LAYOUTS[layout].title}, {world} rank{'s' * (world > 1)}, {backend}")
    for column in ("", *names):
        result.add_column(column, justify="right")
    for row in ROWS:
        if row == "exposed":
            text = ", ".join(f"{name} {value:.2f}" for name, value in found[row].items())
            result.caption = f"exposed, ms: {text}" if world > 1 else None
        elif found[row]:
            result.add_row(row, *(f"{found[row][name]:.3g}" if name in found[row] else "" for name in names))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=["tp", "fsdp"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=LlamaConfig.sequence)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of parameters and batches")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=15)
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
    everything = {}
    for world in args.ranks:
        unfit = [layout for layout in args.layouts if len(LAYOUTS[layout].dims) == 2 and world not in (1, 4)]
        if unfit:
            parser.error(f"--ranks {world}: {', '.join(unfit)} need 1 or 4")
        everything[world] = run(world, device, args)
        for layout, found in everything[world].items():
            Console(width=120).print(table(layout, world, device, found))
        if args.json:  # after each job, so that a run that is cut short leaves what it has
            pathlib.Path(args.json).write_text(
                json.dumps({"device": name, "torch": torch.__version__, "ranks": everything}, indent=1)
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
