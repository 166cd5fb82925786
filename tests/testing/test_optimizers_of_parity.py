"""Parity over the steps of adaptive optimizers: correct models are equal, a fault of a thousandth in one gradient is
found.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import shard_parameters, tensor_parallel
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.compare_values import compare_values
from dtensor_compile.testing.parity import Allowed, Settings, case_of, compare_case, sum_of_squares


@dataclass(frozen=True)
class Faulty(Settings):
    """Settings under which the gradient of one parameter is a thousandth too large."""

    parameter: str = ""

    def compile(self, function):
        if not self.eager and self.parameter:
            function.get_parameter(self.parameter).register_hook(lambda grad: grad * 1.001)
        return super().compile(function)


@dataclass(frozen=True)
class Rounded(Faulty):
    """Nothing is compiled; every gradient has another rounding, as that of sums in another order."""

    def compile(self, function):
        if self.eager:
            return function
        random = torch.Generator().manual_seed(5)  # torch's own is compared
        for p in function.parameters():
            p.register_hook(
                lambda grad: grad + 1e-7 * grad.abs().max() * torch.empty_like(grad).normal_(generator=random)
            )
        if self.parameter:
            function.get_parameter(self.parameter).register_hook(lambda grad: grad * 1.001)
        return function


class Block(nn.Module):
    def __init__(self, bias=True, causal=True, parallel=False):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=bias) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.up, self.down = nn.Linear(16, 32, bias=bias), nn.Linear(32, 16, bias=bias)
        self.causal, self.parallel = causal, parallel

    def attention(self, x):
        q, k, v = (f(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))

    def forward(self, x):
        y = x + self.attention(self.norms[0](x))
        return y + self.down(F.gelu(self.up(self.norms[1](x if self.parallel else y))))


class Transformer(nn.Module):
    def __init__(self, blocks=1, tied=False, patches=False, **kwargs):
        super().__init__()
        self.embed = nn.Linear(12, 16) if patches else nn.Embedding(32, 16)
        self.blocks = nn.Sequential(*(Block(**kwargs) for _ in range(blocks)))
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.norm(self.blocks(self.embed(x))))


SMALL = LlamaConfig(layers=1, dim=16, ffn_dim=32, heads=2, kv_heads=2, vocab=32, sequence=6)
TOKENS = torch.arange(12).view(2, 6) * 7 % 32


def spread(model, mesh):
    if mesh is None:
        return model
    columns = {name: ColwiseParallel() for name, _ in model.named_modules() if name.endswith((".q", ".k", ".v", ".up"))}
    rows = {name: RowwiseParallel() for name, _ in model.named_modules() if name.endswith((".o", ".down"))}
    return parallelize_module(model, mesh, columns | rows)


def transformer(fault="blocks.0.up.weight", inputs=TOKENS, **kwargs):
    return lambda mesh: (spread(Transformer(**kwargs), mesh), inputs, fault)


def convolutions(mesh):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    x = torch.randn(4, 3, 6, 6)
    return (
        (model, x, "0.weight")
        if mesh is None
        else (distribute_module(model, mesh), distribute_tensor(x, mesh, [Replicate()]), "0.weight")
    )


def perceptron(mesh):
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return model if mesh is None else parallelize_module(model, mesh, plan), torch.randn(4, 8), "0.weight"


#: A model, its input, and how the name of the parameter begins whose gradient is wrong, on a mesh or without one.
MODELS = {
    "perceptron": perceptron,
    "llama": lambda mesh: (
        Llama(SMALL) if mesh is None else tensor_parallel(Llama(SMALL), mesh), TOKENS, "blocks.0.feed_forward.w1.weight"
    ),
    "llama in shards": lambda mesh: (
        Llama(SMALL) if mesh is None else shard_parameters(Llama(SMALL), mesh), TOKENS, "blocks.0.attention.wq"
    ),
    "parallel blocks": transformer(parallel=True),
    "tied embeddings": transformer(tied=True, fault="embed.weight"),
    "not causal": transformer(causal=False, fault="blocks.0.v.bias"),
    "no biases": transformer(bias=False),
    "patches": transformer(patches=True, causal=False, inputs=torch.randn(2, 6, 12), fault="embed.bias"),
    "deep": transformer(blocks=3, fault="blocks.2.down.weight"),
    "convolutions": convolutions,
}  # fmt: skip


def check(name, mesh, kind, optimizer, calls=3, **settings):
    torch.manual_seed(0)
    model, x, begin = MODELS[name](mesh)
    parameter = next(name for name, _ in model.named_parameters() if name.startswith(begin))
    case = case_of(model, [x], loss=sum_of_squares, optimizer=optimizer, calls=calls)
    assert not compare_case(case, kind(**settings)).differences
    found = compare_case(case, kind(**settings, parameter=parameter)).differences
    assert f"grad.{parameter} of call 1" in [d.what.partition(" at ")[0] for d in found]


ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_other_rounding_is_no_difference_and_a_thousandth_is_one(name):
    check(name, None, Rounded, ADAMW)


@pytest.mark.parametrize("optimizer", [
    functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True, foreach=True),
    functools.partial(torch.optim.AdamW, lr=1e-2, fused=True), functools.partial(torch.optim.Adagrad, lr=1e-2),
    functools.partial(torch.optim.RMSprop, lr=1e-2), functools.partial(torch.optim.Adamax, lr=1e-2),
])  # fmt: skip
def test_every_optimizer(optimizer):
    torch.manual_seed(0)
    model, x, parameter = MODELS["parallel blocks"](None)
    case = case_of(model, [x], loss=sum_of_squares, optimizer=optimizer, calls=4)
    assert not compare_case(case, Rounded()).differences
    assert compare_case(case, Rounded(parameter=parameter)).differences


def test_a_wrong_gradient_is_not_replaced():
    """What follows from it shows too: the step and the next call."""
    torch.manual_seed(0)
    model, x, _ = perceptron(None)
    case = case_of(model, [x], loss=sum_of_squares, optimizer=functools.partial(torch.optim.SGD, lr=0.1), calls=2)
    found = {d.what.partition(" at ")[0] for d in compare_case(case, Rounded(parameter="0.weight")).differences}
    assert {"grad.0.weight of call 1", "state.0.weight", "output[1]"} <= found


def test_rounding_of_terms_is_allowed_and_no_more():
    zero, noise = torch.zeros(3), torch.tensor([1e-6, -1e-6, 0.0])
    assert compare_values("x", zero, noise) and compare_values("x", zero, noise, allowed=Allowed(terms=5.0))
    assert not compare_values("x", zero, noise, allowed=Allowed(terms=10.0))


@pytest.mark.slow
@on_ranks(2, timeout=500)
def test_ten_models_on_ranks():
    for name in MODELS:
        check(name, make_mesh((2,), ("tp",)), Faulty, ADAMW, options={"kernels": "aten"})
