"""Models that nobody here wrote, on one GPU: a job of one rank over NCCL, under the wrappers of their users.

    python tools/bench/third_party_gpu.py [--repeats 10] [--only TEXT] [--json FILE]

Each variant of a program (eager; stock: the whole step with Inductor; ours; once: equal blocks compiled once) is a
process of its own, because Dynamo keeps what it knows of a function for all backends. They compile side by side and
take turns on the GPU. The table has the loss's and the gradients' relative difference from eager (norms, of all
gradients together), the median ms of forward and backward, MiB that a step needs beyond what was held before it, and
Triton's kernels and others. Needs ``transformers``; exit status 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu import Turns, profiled, seconds
from rich.console import Console
from rich.table import Table
from third_party import llama, vit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

VARIANTS = ("eager", "stock", "ours", "once")


def _sharded(model: nn.Module, blocks: Any) -> nn.Module:
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _decoder(family: str) -> nn.Module:
    model = llama(4, 2048, 5632, 32000, heads=16, family=family)
    return _sharded(model, model.model.layers)


#: A wrapped model on the GPU, and what makes its input.
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "fully_shard, HF Llama": (lambda: _decoder("Llama"), lambda: torch.randint(32000, (2, 2048))),
    "fully_shard, HF Qwen2": (lambda: _decoder("Qwen2"), lambda: torch.randint(32000, (2, 2048))),
    "DDP, HF ViT": (
        lambda: DistributedDataParallel(vit(6, 768, 224, 16, heads=12)),
        lambda: torch.randn(16, 3, 224, 224),
    ),
}


def measure(name: str, variant: str, folder: str, repeats: int) -> dict[str, Any]:
    """Figures of one variant, on the GPU that is there."""
    warnings.simplefilter("ignore")
    turns = Turns(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/{name}-{variant}.store", rank=0, world_size=1,
        device_id=torch.device("cuda", 0),
    )  # fmt: skip
    try:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model, x = (make() for make in PROGRAMS[name])

        def loss(x: torch.Tensor) -> torch.Tensor:
            return model(x).logits.float().square().mean()

        run = loss
        if variant != "eager":
            backend = "inductor" if variant == "stock" else "dtensor"
            options = {"blocks": "once"} if variant == "once" else None
            run = torch.compile(loss, backend=backend, fullgraph=backend == "dtensor", options=options)

        def step() -> torch.Tensor:
            model.zero_grad()
            value = run(x)
            value.backward()
            return value.detach()

        began = time.perf_counter()
        value = float(step())
        found: dict[str, Any] = {"loss": value, "compile": time.perf_counter() - began}
        gradients = {n: getattr(p.grad, "_local_tensor", p.grad).cpu() for n, p in model.named_parameters()}
        torch.save(gradients, f"{folder}/{name}-{variant}.pt".replace(" ", "_"))
        step()
        with turns.mine():
            step()
            found["step"] = 1e3 * statistics.median(seconds(step) for _ in range(repeats))
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            found["memory"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            kernels = profiled(step)
        counts = {kernel: count for kernel, (count, _) in kernels["by_kernel"].items()}
        found["triton"] = sum(count for kernel, count in counts.items() if kernel.startswith("triton_"))
        found["other"] = sum(counts.values()) - found["triton"]
        return found | {"busy": kernels["busy"], "kernels": kernels["by_kernel"]}
    finally:
        dist.destroy_process_group()


def compare(folder: str, name: str, found: dict[str, dict[str, Any]]) -> None:
    """Adds the differences from eager to the figures of each variant."""
    gradients = {v: torch.load(f"{folder}/{name}-{v}.pt".replace(" ", "_")) for v in found if "failed" not in found[v]}
    for variant, mine in gradients.items():
        pairs = [(mine[parameter], gradient) for parameter, gradient in gradients["eager"].items()]
        apart = sum(float((a - b).square().sum()) for a, b in pairs)
        found[variant]["gradient"] = (apart / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5
        found[variant]["difference"] = abs(found[variant]["loss"] / found["eager"]["loss"] - 1)


def table(name: str, found: dict[str, dict[str, Any]]) -> Table:
    result = Table(title=name)
    for column in ("", "loss", "gradient", "first step s", "step ms", "busy ms", "memory MiB", "triton + other"):
        result.add_column(column, justify="right")
    for variant, row in found.items():
        if "failed" in row:
            result.add_row(variant, row["failed"][:60])
            continue
        cells = (f"{row['difference']:.1e}", f"{row['gradient']:.1e}", f"{row['compile']:.1f}", f"{row['step']:.2f}")
        more = (f"{row['busy']:.2f}", f"{row['memory']:,.0f}", f"{row['triton']} + {row['other']}")
        result.add_row(variant, *cells, *more)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="programs with this text in their names")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("third_party_gpu: there is no GPU (torch.cuda.is_available() is false)", file=sys.stderr)
        return 2
    names = [name for name in PROGRAMS if args.only in name]
    everything: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in names}
    context = multiprocessing.get_context("spawn")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    with tempfile.TemporaryDirectory() as folder, context.Pool(len(names) * len(VARIANTS), maxtasksperchild=1) as pool:
        jobs = [(n, v, pool.apply_async(measure, (n, v, folder, args.repeats))) for n in names for v in VARIANTS]
        for name, variant, job in jobs:
            try:
                everything[name][variant] = job.get()
            except Exception as error:  # noqa: BLE001 - a variant may not work, which is a result
                everything[name][variant] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
                print(f"{name}, {variant}: {everything[name][variant]['failed']}", file=sys.stderr, flush=True)
        for name in names:
            compare(folder, name, everything[name])
            Console(width=120).print(table(name, everything[name]))
            if args.json:
                pathlib.Path(args.json).write_text(json.dumps(everything, indent=1))
    return int(any("failed" in row for found in everything.values() for v, row in found.items() if v != "stock"))


if __name__ == "__main__":
    sys.exit(main())
