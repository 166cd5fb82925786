"""Programs that train for a few steps with a batch that varies, eager and compiled; run by ``test_warm_caches.py`` in
jobs that share caches.

torchrun --nproc-per-node 2 -m tests.warm_programs [NAME...]: prints ``NAME equal``, or what differs, and how many
graphs caches had."""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import shard_parameters, tensor_parallel
from dtensor_compile.testing import make_mesh
from dtensor_compile.testing.compare_values import compare_values

CONFIG = LlamaConfig(layers=1, dim=32, ffn_dim=48, heads=4, kv_heads=2, vocab=64, sequence=16)
BATCHES = (2, 4, 6, 3, 8)


def numbers(batch: int, *shape: int) -> torch.Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))


def indices(batch: int) -> torch.Tensor:
    return torch.randint(64, (batch, 16), generator=torch.Generator().manual_seed(batch))


class MLP(nn.Module):
    def __init__(self, dim: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def uneven() -> nn.Module:
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    return parallelize_module(MLP(7, 13), make_mesh((2,), ("tp",)), plan)


def lookup() -> nn.Module:
    return parallelize_module(
        nn.Embedding(64, 6),
        make_mesh((2,), ("tp",)),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    )


def fsdp(**options: Any) -> nn.Module:
    model = nn.Sequential(MLP(), MLP())
    for part in (*model, model):
        fully_shard(part, mesh=make_mesh((2,), ("dp",)), **options)
    return model


def mixed() -> nn.Module:
    return fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def both() -> nn.Module:
    mesh = make_mesh((1, 2), ("dp", "tp"))
    model = nn.Sequential(*(parallelize_module(MLP(), mesh["tp"], PLAN) for _ in range(2)))
    for part in (*model, model):
        fully_shard(part, mesh=mesh["dp"])
    return model


class Sharded(nn.Module):
    """A batch in uneven shards, whose global size follows from the local one, and a sum over it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            DTensor.from_local(numbers(4, 4), make_mesh((2,), ("dp",)), [Replicate()], run_check=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = DTensor.from_local(x, self.weight.device_mesh, [Shard(0)], run_check=False)
        return (x @ self.weight).redistribute(placements=[Replicate()])


#: Model, input of a batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "tensor parallel Llama": (lambda: tensor_parallel(Llama(CONFIG), make_mesh((2,), ("tp",))), indices),
    "Llama with sharded parameters": (lambda: shard_parameters(Llama(CONFIG), make_mesh((2,), ("dp",))), indices),
    "uneven shards": (uneven, lambda batch: numbers(batch, 7)),
    "row-wise embedding": (lookup, indices),
    "fully_shard": (fsdp, lambda batch: numbers(batch, 8)),
    "fully_shard, mixed precision": (mixed, lambda batch: numbers(batch, 8)),
    "fully_shard x tensor parallel": (both, lambda batch: numbers(batch, 8)),
    "fully_shard, gradients accumulated": (fsdp, lambda batch: numbers(batch, 8)),
    "DDP": (lambda: nn.parallel.DistributedDataParallel(MLP()), lambda batch: numbers(batch, 8)),
    "sharded batch": (Sharded, lambda batch: numbers(batch, 4)),
}


def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return (out.full_tensor() if isinstance(out, DTensor) else out).square().mean()


def forward_and_backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = forward(model, x)
    loss.backward()
    return loss.detach()


#: fully_shard and DDP refuse their own backward pass in the region.
PROGRAMS = {name: (*parts, forward) for name, parts in MODELS.items()} | {
    f"{name}, backward inside": (*MODELS[name], forward_and_backward)
    for name in ("tensor parallel Llama", "Llama with sharded parameters", "uneven shards", "sharded batch")
}


def train(
    make: Callable[[], nn.Module],
    data: Callable[[int], torch.Tensor],
    step: Callable[..., Any],
    *,
    compiled: bool,
    accumulates: bool,
) -> list[Any]:
    torch.manual_seed(0)
    model = make()
    call = torch.compile(step, backend="dtensor", fullgraph=True) if compiled else step
    seen = []
    for batch in BATCHES:
        reduces = not accumulates or batch % 2 == 0
        if accumulates:
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(reduces)
        loss = call(model, data(batch))
        if loss.requires_grad:
            loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        placements = {name: getattr(gradient, "placements", None) for name, gradient in gradients.items()}
        whole = {name: copy.copy(g.full_tensor()) if isinstance(g, DTensor) else g for name, g in gradients.items()}
        seen.append((loss.detach(), whole, placements))
        if reduces:
            model.zero_grad()
    return seen


def compare(name: str) -> str:
    counters.reset()
    try:
        accumulates = name.endswith("accumulated")
        eager, ours = (train(*PROGRAMS[name], compiled=compiled, accumulates=accumulates) for compiled in (False, True))
        differences = compare_values(name, eager, ours)
    except Exception:  # noqa: BLE001 - reported, and the programs after it run
        return f"raises {traceback.format_exc()[-1500:]}"
    found = torch._dynamo.utils.counters
    hits = found["inductor"]["fxgraph_cache_hit"] + found["aot_autograd"]["autograd_cache_hit"]
    return f"equal, {hits} found" if not differences else "differs: " + "; ".join(map(str, differences[:3]))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in sys.argv[1:] or PROGRAMS:
        print(f"rank {dist.get_rank()}: {name}: {compare(name)}\n", end="", flush=True)
    dist.destroy_process_group()
