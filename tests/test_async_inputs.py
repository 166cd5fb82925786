"""Compiled regions whose inputs eager has not waited for: AsyncCollectiveTensors of an eager DTensor module, alone or
in DTensors.
"""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import tensor_parallel
from dtensor_compile.testing import make_mesh, on_ranks
from tests.cases import mostly_slow

BACKENDS = pytest.mark.parametrize("backend", mostly_slow(["dtensor", "dtensor_aten"], "dtensor_aten"))
INPUT = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(1))


def row_wise(local=True):
    """A layer whose result is an AsyncCollectiveTensor, or a DTensor over one."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    return parallelize_module(
        layer, make_mesh((2,), ("tp",)), RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    )


class Gathered(nn.Module):
    """A layer whose result is an AsyncCollectiveTensor that is no view, so that the program may write to it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 32).reshape(4, 8))

    def forward(self, x):
        return functional.all_gather_tensor_autograd(x @ self.weight, 0, dist.group.WORLD)


LAYERS = {"tensor": row_wise, "in a DTensor": functools.partial(row_wise, local=False), "gathered": Gathered}


def is_async(h):
    local = h._local_tensor if isinstance(h, DTensor) else h
    return type(local) is AsyncCollectiveTensor and not local.completed


def region(function, backend, **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options) if backend else function


def scale(h):
    return torch.tanh(h * 3)


def alone(h, backend):
    return region(scale, backend)(h)


def residual(h, backend):
    return h + region(scale, backend)(h)


def twice_in_one_call(h, backend):
    return region(lambda a, b: a * b.sin() + a, backend)(h, h)


def in_two_calls(h, backend):
    call = region(scale, backend)
    return call(h) * call(h)


def beside_inputs_that_are_ready(h, backend):
    call = region(scale, backend)
    return call(h + 1) + call(h) + call(h + 2)


def in_containers(h, backend):
    call = region(lambda inputs: inputs["a"] * inputs["b"][0].sin(), backend)
    return call({"a": h, "b": [h * 2]}) + call({"a": h + 1, "b": [h]})


def with_a_parameter(h, backend):
    weight = torch.linspace(-1, 1, 64).reshape(8, 8)
    if isinstance(h, DTensor):
        weight = DTensor.from_local(weight, h.device_mesh, [Replicate()], run_check=False)
    weight.requires_grad_()
    out = region(lambda h, weight: torch.tanh(h @ weight), backend)(h, weight)
    (gradient,) = torch.autograd.grad(out.sum(), [weight], retain_graph=True)
    return out + gradient[0]


def returned_as_a_view(h, backend):
    return region(lambda x: x.transpose(0, 2), backend)(h).exp()


def without_gradients(h, backend):
    with torch.no_grad():
        ready = region(scale, backend)(h)
    return h * ready


def with_sizes_that_vary(h, backend):
    call = region(scale, backend, dynamic=True)
    return call(h)


USES = [
    alone, residual, twice_in_one_call, in_two_calls, beside_inputs_that_are_ready, in_containers, with_a_parameter,
    returned_as_a_view,
    without_gradients, with_sizes_that_vary,
]  # fmt: skip


def write(h):
    h.mul_(2)
    return h.cos()


def in_place(h, backend):
    return region(write, backend)(h) + h


def in_place_on_a_piece(h, backend):
    def write_piece(h):
        h[:, 0].mul_(2)
        return h.cos()

    return region(write_piece, backend)(h) + h


def in_place_through_another_input(h, backend):
    def write_other(h, flat):
        flat.mul_(2)
        return h.cos()

    return region(write_other, backend)(h, h.view(-1)) + h


def in_place_without_gradients(h, backend):
    h = h.detach()
    assert is_async(h)
    return region(write, backend)(h) + h


def run(layer, use, backend):
    torch._dynamo.reset()
    counters.reset()
    layer = LAYERS[layer]()
    h = layer(INPUT)
    assert is_async(h)
    out = use(h, backend)
    if out.requires_grad:
        (out.full_tensor() if isinstance(out, DTensor) else out).square().sum().backward()
    gradient = layer.weight.grad
    return out.detach(), gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, h._version


def assert_as_in_eager(layer, use, backend):
    (want, gradient, version), (got, compiled_gradient, compiled_version) = (
        run(layer, use, None),
        run(layer, use, backend),
    )
    assert type(got) is type(want) and getattr(got, "placements", None) == getattr(want, "placements", None)
    torch.testing.assert_close(got, want, msg=lambda text: f"{use.__name__}: {text}")
    torch.testing.assert_close(compiled_gradient, gradient, msg=lambda text: f"{use.__name__}, gradient: {text}")
    assert (compiled_version > 0) == (version > 0), use.__name__


@pytest.mark.parametrize(
    "layer, backend",
    mostly_slow(
        itertools.product(("tensor", "in a DTensor", "gathered"), ("dtensor", "dtensor_aten")),
        ("tensor", "dtensor_aten"),
        ("gathered", "dtensor_aten"),
    ),
)
@on_ranks(2)
def test_results_and_gradients_of_inputs_that_were_not_waited_for(layer, backend):
    for use in USES:
        assert_as_in_eager(layer, use, backend)


@BACKENDS
@on_ranks(2)
def test_inputs_that_were_not_waited_for_are_written_in_place(backend):
    for use in (in_place, in_place_on_a_piece, in_place_through_another_input, in_place_without_gradients):
        assert_as_in_eager("gathered", use, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor_aten", "dtensor"])
@pytest.mark.parametrize("batches", [(2,), (2, 1)], ids=str)
@on_ranks(2)
def test_blocks_of_a_tensor_parallel_model_are_compiled_one_by_one(backend, batches):
    config = LlamaConfig(layers=2, dim=32, ffn_dim=48, heads=4, kv_heads=2, vocab=64, sequence=16)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    seen = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model = tensor_parallel(Llama(config), make_mesh((2,), ("tp",)))
        if compiled:
            for block in model.blocks:
                block.compile(backend=backend, fullgraph=True)
        for rows in batches:
            model(tokens[:rows]).square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        seen[compiled] = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    for name, gradient in seen[False].items():
        torch.testing.assert_close(seen[True][name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}")
