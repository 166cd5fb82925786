"""The peak of memory that ``dtensor-compile plan`` forecasts for an emulated GPU, against what the same programs
allocate on a CPU; beside it, what torch's tracker of ``fully_shard`` says of eager, against what eager allocates.

    python tools/bench/plan_memory.py [--only TEXT] [--json FILE]

Each program makes two training steps on one rank of a simulated job with real tensors; of the second, what torch's CPU
allocator gives out is counted by the profiler, on top of parameters and states. The forecast is of the code for an
emulated H100: other kernels are fused there, so that the two need not be equal. ``FSDPMemTracker``
(``torch.distributed._tools``) follows the operators of an eager step, of programs that ``fully_shard`` wraps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from configurations import Checkpointed
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import tensor_parallel
from dtensor_compile.forecast.forecast import make_plan
from dtensor_compile.forecast.training import StepSettings
from dtensor_compile.offline.simulated_job import job
from dtensor_compile.report.run_target import Job
from dtensor_compile.testing import make_mesh
from dtensor_compile.testing.step_memory import allocated_peak

CONFIG = LlamaConfig(layers=4, dim=256, ffn_dim=768, heads=8, kv_heads=4, vocab=1024, sequence=256)
BATCH = 4


@dataclasses.dataclass(frozen=True)
class Program:
    """A Llama on a mesh of these dims."""

    mesh: tuple[tuple[str, int], ...]
    mixed: bool = False
    checkpointed: bool = False
    experts: bool = False

    @property
    def arguments(self) -> dict[str, bool]:
        """Of `build`, beside the mesh."""
        return {"mixed": self.mixed, "checkpointed": self.checkpointed, "experts": self.experts}


PROGRAMS = {
    "dense": Program((("tp", 1),)),
    "tensor parallel": Program((("tp", 2),)),
    "fully_shard": Program((("dp", 2),)),
    "fully_shard x tensor parallel": Program((("dp", 2), ("tp", 2))),
    "fully_shard, checkpointed": Program((("dp", 2),), checkpointed=True),
    "fully_shard, mixed precision": Program((("dp", 2),), mixed=True),
    "fully_shard, experts": Program((("dp", 2),), experts=True),
}


class Experts(nn.Module):
    """Each token goes to one of a few experts, as long as that has room; dispatched by products, as in GShard
    (arXiv:2006.16668, algorithm 1)."""

    def __init__(self, config: LlamaConfig, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(config.dim, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, config.dim, config.ffn_dim) / config.dim**0.5)
        self.down = nn.Parameter(torch.randn(count, config.ffn_dim, config.dim) / config.ffn_dim**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        count = self.up.shape[0]
        room = tokens.shape[0] // count
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        is_chosen = F.one_hot(chosen, count)
        place = is_chosen.cumsum(0) * is_chosen - 1
        goes_to = F.one_hot(place.clamp(0, room - 1), room) * ((place >= 0) & (place < room)).unsqueeze(-1)
        dispatch = goes_to.to(x.dtype)
        hidden = torch.einsum("tec,td->ecd", dispatch, tokens) @ self.up
        out = torch.einsum("tec,ecd->td", dispatch * weight[:, None, None], F.silu(hidden) @ self.down)
        return out.view_as(x)


def build(
    mesh: DeviceMesh, mixed: bool = False, checkpointed: bool = False, experts: bool = False
) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The target of the plan."""
    with torch.device(mesh.device_type):
        model: nn.Module = Llama(CONFIG)
        if experts:
            for block in model.blocks:
                block.feed_forward = Experts(CONFIG)
        tokens = torch.zeros(BATCH, CONFIG.sequence, dtype=torch.long)
    return spread(model, mesh, mixed, checkpointed), (tokens,)


def spread(model: nn.Module, mesh: DeviceMesh, mixed: bool, checkpointed: bool) -> nn.Module:
    """A Llama under ``fully_shard`` over the mesh dim dp and tensor parallel over tp, if there are such."""
    dims = mesh.mesh_dim_names or ()
    if "tp" in dims:
        tensor_parallel(model, mesh["tp"])
    if checkpointed:
        model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    if "dp" in dims:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    return model


def allocated(program: Program, backend: str | None = "dtensor") -> tuple[int, int]:
    """Bytes at the peak of the second step, on a CPU, and what torch's tracker says of it (0 where it does not apply).

    Args:
        backend: None runs the program in eager.
    """
    torch.set_num_threads(1)
    with job(math.prod(size for _, size in program.mesh)):
        names, sizes = zip(*program.mesh)
        model, (tokens,) = build(make_mesh(sizes, names), **program.arguments)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        run = torch.compile(model, backend=backend) if backend else model

        def step() -> None:
            _loss(run(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        peak = _bytes_of([*model.parameters(), *model.buffers(), tokens, *states]) + allocated_peak(step)
        tracked = 0
        if backend is None and isinstance(model, FSDPModule):
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((tokens,))
            with tracker:
                step()
            tracked = sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())
        return peak, tracked


def _loss(out: torch.Tensor) -> torch.Tensor:
    logits = out.flatten(0, -2)
    return F.cross_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.long))


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    storages = [getattr(x, "_local_tensor", x).untyped_storage() for x in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(name: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    program = PROGRAMS[name]
    plan = make_plan(
        f"{__file__}:build",
        Job(program.mesh),
        gpu="h100",
        settings=StepSettings("cross_entropy"),
        arguments=program.arguments,
    )
    eager, tracked = allocated(program, None)
    return {
        "name": name,
        "forecast": plan.memory.peak,
        "allocated": allocated(program)[0],
        "eager": eager,
        "tracked": tracked,
    }


def _compared(measured: int, said: int) -> list[str]:
    """Both in MiB, and by how much one is larger; the first alone if nothing is said."""
    mib = f"{measured / 2**20:.1f}"
    return [mib, f"{said / 2**20:.1f}", f"{said / measured - 1:+.1%}"] if said else [mib, "", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="programs with this text in their names")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = []
    for name in PROGRAMS:
        if args.only in name:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure, (name,)))
            print(rows[-1], flush=True)
    table = Table(title="peak of a training step, MiB")
    for column in ("program", "allocated", "forecast", "difference", "eager", "FSDPMemTracker", "difference"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for row in rows:
        table.add_row(
            row["name"], *_compared(row["allocated"], row["forecast"]), *_compared(row["eager"], row["tracked"])
        )
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
