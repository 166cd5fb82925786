"""Small models, spread over ranks as users do it, for the benchmarks: a name, a mesh, and a function to a model and its
inputs.

Nothing here knows of a compiler. A model is called with its inputs; the sum of what it returns is what goes backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.utils.parametrize import register_parametrization

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import shard_parameters, tensor_parallel, two_dim

Built = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A model on a mesh of `shape` whose dims are called `dims`; `around` is entered for its forward and backward."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    build: Callable[[DeviceMesh], Built]
    around: Callable[[], AbstractContextManager[None]] = nullcontext


SMALL = LlamaConfig(layers=2, dim=64, ffn_dim=192, heads=8, kv_heads=4, vocab=256, sequence=32)
BATCH = 4


def _tokens(batch: int = BATCH) -> torch.Tensor:
    return torch.arange(batch * SMALL.sequence).reshape(batch, SMALL.sequence) % SMALL.vocab


def tensor_and_sequence_parallel(mesh: DeviceMesh) -> Built:
    """The first example: activations between the blocks are split by sequence."""
    return tensor_parallel(Llama(SMALL), mesh), (_tokens(),)


def sharded_parameters(mesh: DeviceMesh) -> Built:
    """The second example: parameters are stored in shards."""
    return shard_parameters(Llama(SMALL), mesh), (_tokens(),)


def two_dims(mesh: DeviceMesh) -> Built:
    """The third example: both, on a 2-D mesh."""
    return two_dim(Llama(SMALL), mesh), (_tokens(),)


def _column_and_row_wise(model: Llama, mesh: DeviceMesh) -> Llama:
    plan: dict[str, Any] = {}
    for i in range(len(model.blocks)):
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            plan[f"blocks.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w2"):
            plan[f"blocks.{i}.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def without_sequence_parallel(mesh: DeviceMesh) -> Built:
    """Weights by columns and rows, activations whole between them."""
    model = _column_and_row_wise(Llama(SMALL), mesh)
    return parallelize_module(model, mesh, {"output": ColwiseParallel(output_layouts=Replicate())}), (_tokens(),)


class ThreeProjections(nn.Module):
    """Blocks of three projections that each gather their input, and one that scatters its output."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for q, k, v, o in zip(self.q, self.k, self.v, self.o):
            x = x + o(torch.sigmoid(q(x)) * k(x) + v(x))
        return x


def sequence_shards_into_projections(mesh: DeviceMesh) -> Built:
    """``ColwiseParallel(input_layouts=Shard(1))`` three times on one activation."""
    layers, plan = 2, {}
    for i in range(layers):
        plan |= {f"{name}.{i}": ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"}
        plan[f"o.{i}"] = RowwiseParallel(output_layouts=Shard(1))
    model = parallelize_module(ThreeProjections(64, layers), mesh, plan)
    return model, (torch.randn(BATCH, 32 // mesh.size(), 64, requires_grad=True),)


class GatheredNarrow(nn.Module):
    """A parameter stored in float32 shards and used whole in bfloat16."""

    def __init__(self, mesh: DeviceMesh, cast_first: bool) -> None:
        super().__init__()
        self.mesh, self.cast_first = mesh, cast_first

    def forward(self, shard: DTensor) -> torch.Tensor:
        if self.cast_first:
            shard = shard.to(torch.bfloat16)
        whole = shard.redistribute(self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        return whole.to(torch.bfloat16)


def _narrow(mesh: DeviceMesh, cast_first: bool) -> Built:
    model = Llama(SMALL)
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
            register_parametrization(module, name, GatheredNarrow(mesh, cast_first), unsafe=True)
    model.rotary = model.rotary.bfloat16()
    return model, (_tokens(),)


def gathered_then_cast(mesh: DeviceMesh) -> Built:
    """Sharded float32 parameters, bfloat16 compute, written in the dear order."""
    return _narrow(mesh, cast_first=False)


def cast_then_gathered(mesh: DeviceMesh) -> Built:
    """Sharded float32 parameters, bfloat16 compute, written in the cheap order."""
    return _narrow(mesh, cast_first=True)


class GroupedQueryAttention(nn.Module):
    """Attention with few heads of keys and values; they are made whole and repeated, then split by query heads."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, dim // heads
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, kv_heads * self.head, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        k, v = (w(x).unflatten(-1, (self.kv_heads, 1, self.head)) for w in (self.k, self.v))
        k, v = (y.expand(-1, -1, -1, self.heads // self.kv_heads, -1).flatten(2, 3).transpose(1, 2) for y in (k, v))
        k, v = (y.redistribute(placements=q.placements) for y in (k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2) * self.head**-0.5, dim=-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def grouped_query_attention(mesh: DeviceMesh) -> Built:
    """Two heads of keys and values on four ranks."""
    model = nn.Sequential(*(GroupedQueryAttention(64, 8, 2) for _ in range(2)))
    plan: dict[str, Any] = {}
    for i in range(2):
        plan |= {
            f"{i}.q": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            f"{i}.k": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=False),
            f"{i}.v": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=False),
            f"{i}.o": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(model, mesh, plan), (torch.randn(BATCH, 32 // mesh.size(), 64, requires_grad=True),)


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())


def vocab_parallel_loss(mesh: DeviceMesh) -> Built:
    """The logits are split by vocabulary, and so is the loss, inside of ``loss_parallel()``."""
    model = tensor_parallel(Llama(SMALL), mesh)
    # Hooks of the first plan stay, so that a second plan for the output has to start from a fresh layer.
    model.output = nn.Linear(SMALL.dim, SMALL.vocab, bias=False)
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(WithLoss(model), mesh, {"model.output": output})
    return model, (_tokens(), distribute_tensor(_tokens(), mesh, [Replicate()], src_data_rank=None))


class Experts(nn.Module):
    """Tokens sorted into (expert, place) by a router of one-hot matrices; experts are spread over ranks."""

    def __init__(self, mesh: DeviceMesh, dim: int, hidden: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.mesh, self.experts, self.capacity = mesh, experts, capacity
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(distribute_tensor(torch.randn(experts, dim, hidden) * dim**-0.5, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(experts, hidden, dim) * hidden**-0.5, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Local tokens (tokens, dim) to the same."""
        y = self.norm(x)
        weight, expert = torch.softmax(self.router(y), -1).max(-1)
        chosen = F.one_hot(expert, self.experts)
        place = (chosen.cumsum(0) - 1) * chosen
        kept = chosen * (place < self.capacity)
        sort = kept.unsqueeze(-1) * F.one_hot(place.clamp(0, self.capacity - 1), self.capacity)
        sent = torch.einsum("td,tec->ecd", y, sort.to(y.dtype))
        local = DTensor.from_local(sent, self.mesh, [Shard(1)], run_check=False)
        local = local.redistribute(placements=[Shard(0)])
        done = torch.bmm(torch.relu(torch.bmm(local, self.up)), self.down)
        back = done.redistribute(placements=[Shard(1)]).to_local()
        return x + torch.einsum("ecd,tec->td", back, sort.to(y.dtype)) * weight.unsqueeze(-1)


def experts_all_to_all(mesh: DeviceMesh) -> Built:
    """Experts on ranks, tokens on ranks: two changes from tokens to experts and back per layer."""
    model = nn.Sequential(*(Experts(mesh, 32, 64, 8, 8) for _ in range(2)))
    return model, (torch.randn(32, 32, requires_grad=True),)


class ConvBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(channels_in, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.b(torch.relu(self.a(x))))


class UNet(nn.Module):
    """Two levels down, two up, with skips; the two ends share a stem."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.second = ConvBlock(channels, channels), ConvBlock(channels, 2 * channels)
        self.middle = ConvBlock(2 * channels, 2 * channels)
        self.third, self.last = ConvBlock(4 * channels, channels), ConvBlock(2 * channels, channels)
        self.stem, self.head = nn.Conv2d(3, channels, 1), nn.Conv2d(channels, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(self.stem(x))
        b = self.second(F.avg_pool2d(a, 2))
        c = self.middle(F.avg_pool2d(b, 2))
        b = self.third(torch.cat([F.interpolate(c, scale_factor=2, mode="nearest"), b], 1))
        return self.head(self.last(torch.cat([F.interpolate(b, scale_factor=2, mode="nearest"), a], 1)))


def unet_data_parallel(mesh: DeviceMesh) -> Built:
    """A convolution net whose parameters are whole on every rank and whose batch is split."""

    class Whole(nn.Module):
        """A parameter that every rank holds; its gradient is summed."""

        def forward(self, parameter: DTensor) -> torch.Tensor:
            return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    model = distribute_module(UNet(), mesh)
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            register_parametrization(module, name, Whole(), unsafe=True)
    return model, (torch.randn(2, 3, 16, 16),)


class Attend(nn.Module):
    """Attention of `x` to `memory`, (batch, length, dim) both."""

    def __init__(self, dim: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        projected = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (y.unflatten(-1, (-1, self.head)).transpose(1, 2) for y in projected)
        weights = torch.softmax(q @ k.transpose(-1, -2) * self.head**-0.5, dim=-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class EncoderDecoder(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.encoder, self.own, self.cross = (nn.ModuleList(Attend(dim, 8) for _ in range(layers)) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3 * layers))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        norms = iter(self.norms)
        for layer in self.encoder:
            y = next(norms)(source)
            source = source + layer(y, y)
        for own, cross in zip(self.own, self.cross):
            y = next(norms)(target)
            target = target + own(y, y)
            target = target + cross(next(norms)(target), source)
        return target


def encoder_decoder(mesh: DeviceMesh) -> Built:
    """Every decoder layer reads the encoder's output, which is split by sequence."""
    layers, plan = 2, {}
    for name in ("encoder", "own", "cross"):
        for i in range(layers):
            plan |= {f"{name}.{i}.{w}": ColwiseParallel(input_layouts=Shard(1)) for w in "qkv"}
            plan[f"{name}.{i}.o"] = RowwiseParallel(output_layouts=Shard(1))
    model = parallelize_module(EncoderDecoder(64, layers), mesh, plan)
    length = 32 // mesh.size()
    return model, tuple(torch.randn(BATCH, length, 64, requires_grad=True) for _ in range(2))


TP, DP = ("tp",), ("dp",)

CASES: tuple[Case, ...] = (
    Case("example: tensor + sequence parallel", (4,), TP, tensor_and_sequence_parallel),
    Case("example: sharded parameters", (4,), DP, sharded_parameters),
    Case("example: both, 2-D", (2, 2), ("dp", "tp"), two_dims),
    Case("columns and rows, no sequence parallel", (4,), TP, without_sequence_parallel),
    Case("sequence shards into three projections", (4,), TP, sequence_shards_into_projections),
    Case("sharded parameters, bf16: gather, cast", (4,), DP, gathered_then_cast),
    Case("sharded parameters, bf16: cast, gather", (4,), DP, cast_then_gathered),
    Case("GQA, fewer KV heads than ranks", (4,), TP, grouped_query_attention),
    Case("vocab-parallel loss", (4,), TP, vocab_parallel_loss, loss_parallel),
    Case("experts, all-to-all", (4,), ("ep",), experts_all_to_all),
    Case("UNet, data parallel", (4,), DP, unet_data_parallel),
    Case("encoder-decoder", (4,), TP, encoder_decoder),
)
