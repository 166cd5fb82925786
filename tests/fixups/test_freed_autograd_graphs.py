"""A loss that is returned after its own backward pass, the way most train steps are written."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import make_mesh, on_ranks
from tests.cases import needs

pytestmark = needs("backward passes inside of the region")


def weight():
    torch.manual_seed(0)
    return nn.Parameter(distribute_tensor(torch.randn(8, 4), make_mesh((2,), ("tp",)), [Shard(0)]))


def steps(function, w, backend, batches=(5, 5, 7)):
    """Results of each call and the gradients after it, compiled with `backend` (None: eager)."""
    counters.reset()
    run = torch.compile(function, backend=backend, fullgraph=True) if backend else function
    results = []
    for batch in batches:
        torch.manual_seed(batch)
        w.grad = None
        out = run(distribute_tensor(torch.randn(batch, 4), w.device_mesh, [Replicate()]), w)
        results.append((out, w.grad))
    return results


def assert_same(got, want):
    for (outs, grad), (wanted, wanted_grad) in zip(got, want, strict=True):
        torch.testing.assert_close(grad.to_local(), wanted_grad.to_local())
        for value, expected in zip(outs, wanted, strict=True):
            assert value.requires_grad == expected.requires_grad
            assert value.placements == expected.placements
            torch.testing.assert_close(value.to_local(), expected.to_local())


@on_ranks(2)
def test_loss_and_activation_are_returned_after_the_backward_pass():
    def step(x, w):
        y = nn.functional.linear(x, w)
        loss = y.square().sum()
        loss.backward()
        return loss, y, y.detach()

    w = weight()
    want = steps(step, w, None)
    got = steps(step, w, "dtensor_aten")
    assert counters.graphs() <= 2
    assert_same(got, want)
    for outs, _ in (*got, *want):
        assert isinstance(outs[0], DTensor)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            outs[0].backward()


@on_ranks(2)
def test_a_graph_that_is_retained_can_be_used_again():
    def step(x, w):
        loss = nn.functional.linear(x, w).square().sum()
        loss.backward(retain_graph=True)
        return (loss,)

    def twice(backend):
        results = steps(step, w, backend, batches=(5,))
        results[0][0][0].backward()
        return results[0][1].to_local()

    w = weight()
    torch.testing.assert_close(twice("dtensor_aten"), twice(None))


@on_ranks(2)
def test_results_that_the_backward_pass_did_not_touch_keep_their_graph():
    def step(x, w, v):
        loss = nn.functional.linear(x, w).square().sum()
        loss.backward()
        return loss, v * 3

    w = weight()
    for backend in (None, "dtensor_aten"):
        v = torch.ones(3, requires_grad=True)
        steps(lambda x, w: step(x, w, v), w, backend, batches=(5,))[0][0][1].sum().backward()
        torch.testing.assert_close(v.grad, torch.full((3,), 3.0))


@on_ranks(2)
def test_plain_tensors_too_and_the_loss_of_a_region_under_no_grad_needs_none():
    layer = nn.Linear(4, 2)

    def step(x):
        with torch.enable_grad():
            loss = layer(x).square().sum()
            loss.backward()
        return loss

    x = torch.ones(3, 4)
    compiled = torch.compile(step, backend="dtensor_aten", fullgraph=True)
    with torch.no_grad():
        loss = compiled(x)
    got = layer.weight.grad.clone()
    layer.zero_grad()
    with torch.no_grad():
        want = step(x)
    assert loss.requires_grad == want.requires_grad
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(got, layer.weight.grad)
