"""Forecast tokens per second of Llama 3.1 on H100s against those that torchtitan published.

    python tools/bench/published_steps.py [--only NAME] [--layers N] [--json FILE]

The published runs (github.com/pytorch/torchtitan, ``benchmarks/llama3_h100_202412_torchtitan.md`` and
``asyncTP_llama3_h100_2025-06_torchtitan.md``, without float8) are of blocks that are compiled one by one, on H100s with
96 GB of HBM2e at 2.4 TB/s and a limit of 500 W. The forecasts are of the whole model compiled by this backend, on the
preset, an H100 with 3.35 TB/s and 700 W: what they have to agree on is how the configurations differ, so that their
ratio is the same for all. The model is `dtensor_compile.demo.llama` with torchtitan's parallelism: ``fully_shard`` with
bfloat16 parameters and float32 reductions, tensor and sequence parallel with a loss over classes in shards, and
selective or full checkpoints of blocks. The same in seconds for fewer layers (``--layers``) says nothing of the
published ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import tensor_parallel
from dtensor_compile.forecast.forecast import make_plan
from dtensor_compile.forecast.step_plan import StepPlan
from dtensor_compile.forecast.training import StepSettings
from dtensor_compile.report.run_target import Job

SEQUENCE = 8192
SIZES = {
    "8B": LlamaConfig(32, 4096, 14336, 32, 8, vocab=128256, sequence=SEQUENCE),
    "70B": LlamaConfig(80, 8192, 28672, 64, 8, vocab=128256, sequence=SEQUENCE),
}


@dataclasses.dataclass(frozen=True)
class Published:
    """A run: its model, mesh, sequences for each data-parallel rank, and checkpoints; tokens per second of a GPU, and
    GiB of the allocator's segments where they are known."""

    size: str
    mesh: tuple[tuple[str, int], ...]
    batch: int
    selective: bool
    tokens: float
    memory: float | None = None


RUNS = {
    "8B, 8 GPUs": Published("8B", (("dp", 8),), 2, True, 6667, 77.0),
    "8B, 128 GPUs": Published("8B", (("dp", 128),), 2, True, 6514, 62.0),
    "8B, 8 x 8": Published("8B", (("dp", 8), ("tp", 8)), 12, True, 4378),
    "70B, 32 x 8": Published("70B", (("dp", 32), ("tp", 8)), 16, False, 597.3),
}

aten = torch.ops.aten
#: What a selective checkpoint keeps, beside every other matmul.
KEPT = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def _contexts() -> Any:
    matmuls = {True: 0, False: 0}

    def choose(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is aten.mm.default:
            matmuls[context.is_recompute] += 1
        kept = func in KEPT or func is aten.mm.default and matmuls[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass, but for what a selective checkpoint keeps."""

    def __init__(self, block: nn.Module, selective: bool) -> None:
        super().__init__()
        self.block, self.more = block, {"context_fn": _contexts} if selective else {}

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **self.more)


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), targets.flatten())


def build(mesh: DeviceMesh, name: str, layers: int = 0) -> Callable[[], None]:
    """The target of the plan: a training step."""
    run, dims = RUNS[name], mesh.mesh_dim_names or ()
    config = dataclasses.replace(SIZES[run.size], **({"layers": layers} if layers else {}))
    with torch.device(mesh.device_type):
        model = Llama(config)
        tokens, targets = torch.zeros(2, run.batch, SEQUENCE, dtype=torch.long).unbind()
    if "tp" in dims:
        output, model.output = model.output, nn.Linear(8, 8)  # in place of one whose result is gathered
        tensor_parallel(model, mesh["tp"])
        shards = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        model.output = parallelize_module(output, mesh["tp"], shards)
    model.blocks = nn.ModuleList(Checkpointed(block, run.selective) for block in model.blocks)
    whole = WithLoss(model)
    for module in (*model.blocks, whole):
        fully_shard(module, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(whole.parameters())
    compiled = torch.compile(whole, backend="dtensor", options={"blocks": "once"})

    def step() -> None:
        with loss_parallel():
            compiled(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def forecast(name: str, layers: int = 0) -> StepPlan:
    warnings.simplefilter("ignore")
    arguments = {"name": name, "layers": layers}
    return make_plan(
        f"{__file__}:build", Job(RUNS[name].mesh), gpu="h100", settings=StepSettings(), arguments=arguments
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=RUNS)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    table = Table(title="tokens per second of a GPU")
    for column in ("", "published", "forecast", "ratio", "step ms", "exposed ms", "GiB published", "peak", "segments"):
        table.add_column(column, justify="right")
    measured = {}
    for name in [args.only] if args.only else RUNS:
        run, plan = RUNS[name], forecast(name, args.layers)
        tokens = run.batch * SEQUENCE / (dict(run.mesh).get("tp", 1) * plan.time.step)
        time, memory = plan.time, plan.memory
        sizes = (f"{size / 2**30:.1f}" for size in (memory.peak, memory.reserved))
        times = (f"{seconds * 1e3:,.0f}" for seconds in (time.step, time.exposed))
        row = (
            f"{run.tokens:,.0f}",
            f"{tokens:,.0f}",
            f"{tokens / run.tokens:.2f}",
            *times,
            str(run.memory or "-"),
            *sizes,
        )
        table.add_row(name, *row)
        measured[name] = dataclasses.asdict(time) | {"tokens": tokens, "peak": memory.peak, "reserved": memory.reserved}
        print(name, *row, flush=True)
    Console(width=140).print(table)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
