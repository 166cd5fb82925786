"""Marked programs on three mesh axes, with sizes that vary, and with marks on results alone."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from dtensor_compile.spmd import (
    Mesh,
    manual_region,
    mark_sharding,
    mark_sharding_with_gradients,
    shard_module,
    wrap_as_sharded_tensor,
)
from dtensor_compile.spmd.constraint import constrain
from dtensor_compile.testing import on_ranks
from tests.spmd.test_annotate import Mlp, compare, follows, mesh22


def _size_that_varies():
    """One graph for all sizes but 1, also those that do not divide, on every rank."""
    model = Mlp()
    mark_sharding(model.up.weight, mesh22(), ("tp", None))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dtensor_aten", fullgraph=True, dynamic=True)
    for n in (4, 6, 5, 8, 7, 3, 2):
        x = mark_sharding(torch.randn(n, 8), mesh22(), ("dp", None))
        got, want = compiled(x), model(x)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (got, want)]
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


class MarkedResult(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.inner, self.mesh = Mlp(), mesh

    def forward(self, x):
        y = self.inner(x)
        mark_sharding(y, self.mesh, ("dp", "tp"))
        return y


def _marks_on_results_alone():
    """They spread backward to what makes the result: the rows of the last weight, the batch of the input."""
    mesh = mesh22()
    mesh.to_device_mesh("cpu")
    found = follows(compare(MarkedResult(mesh), torch.randn(4, 8)))
    want = {
        "inner_modules_down_parameters_weight": "RS(0)",
        "inner_modules_down_parameters_bias": "RS(0)",
        "L_x": "S(0)R",
    }
    assert found == want, found


def _gradients_of_a_mark():
    """On its way back, a gradient stays as the mark says; without gradients it is placed as the value was before the
    mark.
    """
    mesh = mesh22()
    mesh.to_device_mesh("cpu")
    for gradients, want in ((False, (Replicate(), Replicate())), (True, (Shard(0), Replicate()))):
        d = wrap_as_sharded_tensor(torch.randn(4, 8), mesh, (None, None)).requires_grad_()
        y = constrain(d, mesh.text, ((0,), ()), gradients)
        y.backward(torch.ones_like(y))
        assert y.placements == (Shard(0), Replicate()) and d.grad.placements == want

    w = torch.randn(4, 8, requires_grad=True)

    def program(mark):
        return lambda x: mark(x * w, mesh, ("dp", None)).sum()

    results = []
    for run in (
        program(mark_sharding_with_gradients),
        torch.compile(program(mark_sharding_with_gradients), backend="dtensor_aten"),
    ):
        w.grad = None
        torch.manual_seed(0)
        run(torch.randn(4, 8)).backward()
        results.append(w.grad)
    torch.testing.assert_close(*results)


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_sizes_and_results():
    _size_that_varies()
    _marks_on_results_alone()
    _gradients_of_a_mark()


@pytest.mark.slow
@on_ranks(8, timeout=280)
def test_three_mesh_axes():
    mesh = Mesh([0, 1, 2, 3, 6, 7, 4, 5], (2, 2, 2), ("pp", "dp", "tp"))
    torch.manual_seed(6)
    model, x = Mlp(), torch.randn(8, 8)
    mark_sharding(model.up.weight, mesh, (("tp", "pp"), None))
    mark_sharding(x, mesh, ("dp", None))
    want = {"up_parameters_bias": "_S(0,2)RS(0)", "down_parameters_weight": "_S(1,2)RS(1)"}
    found = follows(compare(model, x, torch.randn(5, 8), calls=1))
    assert found == want, found
    region = manual_region(in_specs=(("pp", ("dp", "tp")),), out_specs=("pp", ("dp", "tp")), mesh=mesh)(torch.sin)
    t = torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(region, backend="dtensor_aten", fullgraph=True)(t), torch.sin(t))
    placed = shard_module(model, x)
    assert {row.name: row.spec for row in placed.placed}["down.weight"] == want["down_parameters_weight"]
