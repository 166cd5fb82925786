"""Linear layers that keep their dims; sharding specs and the loader."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_compile import record
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.errors import PlacementError
from dtensor_compile.spmd import Mesh, ShardedLoader, ShardingSpec, mark_sharding, with_nd_linear
from dtensor_compile.spmd.annotate import mark_of
from dtensor_compile.testing import captured_graph, on_ranks


def test_shares_parameters_and_leaves_the_module_alone():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2, bias=False))
    other = with_nd_linear(model)
    assert (
        type(model[0]) is nn.Linear and [p is q for p, q in zip(model.parameters(), other.parameters())] == [True] * 3
    )
    for shape in ((4,), (3, 4), (2, 3, 4), (2, 1, 3, 4), (0, 4)):
        x = torch.randn(*shape, dtype=torch.float64).requires_grad_()
        y = x.detach().clone().requires_grad_()
        model, other = model.double(), other.double()
        results = []
        for run, value in ((model, x), (other, y)):
            out = run(value)
            model.zero_grad()
            out.square().sum().backward()
            results.append([out, value.grad, *(p.grad.clone() for p in model.parameters())])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)


def test_autocast():
    layer = nn.Linear(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        a, b = layer(torch.ones(2, 3, 4)), with_nd_linear(layer)(torch.ones(2, 3, 4))
    assert a.dtype == b.dtype == torch.bfloat16
    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def _sequence_shards():
    """The second dim cut: the plain layer has to gather what is folded, the other sends sums of gradients alone."""
    mesh = Mesh(range(4), (2, 2), ("dp", "cp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    x = mark_sharding(torch.randn(4, 6, 8), mesh, ("dp", "cp", None))
    sent, results = {}, {}
    for name, model in (("plain", copy.deepcopy(plain)), ("nd", with_nd_linear(copy.deepcopy(plain)))):
        torch._dynamo.reset()
        with record() as recording:
            y = torch.compile(model, backend="dtensor_aten", fullgraph=True)(x)
            y.square().sum().backward()
        sent[name] = recording.report().ours.totals.all.bytes
        results[name] = [y.detach(), *(p.grad for p in model.parameters())]
    want = plain(x)
    want.square().sum().backward()
    for name, got in results.items():
        for a, b in zip(got, [want.detach(), *(p.grad for p in plain.parameters())], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4, msg=lambda text: f"{name}: {text}")
    assert sent["nd"] <= sent["plain"], sent
    return sent


UNEVEN = [
    ((4, 5, 8), ("dp", "tp", None), 6),
    ((3, 3, 8), (("dp", "tp"), None, None), 6),  # one rank has none of the batch
    ((2, 3, 3), (None, None, ("dp", "tp")), 5),  # and none of the features
    ((1, 5, 7), ("dp", "tp", None), 3),
    ((2, 1, 3, 6), (None, "dp", "tp", None), 4),
]


def _uneven_sizes():
    mesh = Mesh(range(4), (2, 2), ("dp", "tp"))
    torch.manual_seed(1)
    for shape, spec, out in UNEVEN:
        plain = nn.Linear(shape[-1], out)
        nd, x, results = with_nd_linear(copy.deepcopy(plain)), torch.randn(*shape), []
        torch._dynamo.reset()
        for layer, run in ((plain, plain), (nd, torch.compile(nd, backend="dtensor_aten", fullgraph=True))):
            given = x.clone().requires_grad_()
            y = run(given if layer is plain else mark_sharding(given, mesh, spec))
            y.square().sum().backward()
            results.append([y.detach(), given.grad, *(p.grad for p in layer.parameters())])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4, msg=lambda text: f"{shape} {spec}: {text}")


@pytest.mark.parametrize("rank, rows, columns", [(0, 2, 3), (3, 1, 2)])
def test_graph_keeps_the_dims_of_uneven_shards(rank, rows, columns):
    """No operator of the forward or the backward sees the leading dims folded into one, also where shards differ."""
    with simulated_job(4, rank):
        mesh = Mesh(range(4), (2, 2), ("dp", "cp"))
        x = mark_sharding(torch.randn(3, 5, 8), mesh, ("dp", "cp", None))
        nd = with_nd_linear(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
        text = captured_graph(nd, x, options={"kernels": "aten"}, stage="planned")
    products = re.findall(r"^linear_nd\w*: \[([\d, ]+)\]", text, re.M)
    assert products == [f"{rows}, {columns}, 16", f"{rows}, {columns}, 8", f"{rows}, {columns}, 16", "8, 16", "16, 8"]
    assert not re.findall(rf": \[({rows * columns}|15), ", text), text


def _specs_and_loader():
    mesh = Mesh(range(4), (2, 2), ("dp", "tp"))
    rank = torch.distributed.get_rank()
    spec = ShardingSpec(mesh, ("dp", None))
    t = torch.arange(16.0).reshape(8, 2)
    assert spec.can_apply(t) and not spec.can_apply(t[0])
    assert spec.apply(t) is t and mark_of(t).mark.axes == ((0,), ())
    batches = [(t, torch.ones(3)), (t + 1, torch.ones(3))]
    loader = ShardedLoader(batches, spec)
    assert len(loader) == 2
    for (x, other), (whole, _) in zip(loader, batches):
        assert (
            x.placements == (Shard(0), Replicate())
            and torch.equal(x.full_tensor(), whole)
            and type(other) is torch.Tensor
        )
        assert torch.equal(x.to_local(), whole.chunk(2)[rank // 2])
    mine = ShardingSpec(mesh, ("dp", "tp"), minibatch=True)
    (x,) = ShardedLoader([t.chunk(2)[rank // 2]], mine)
    assert x.placements == (Shard(0), Shard(1)) and torch.equal(x.full_tensor(), t)
    (named,) = ShardedLoader([{"x": t, "n": 3}], {"x": spec})
    assert isinstance(named["x"], DTensor) and named["n"] == 3
    with pytest.raises(PlacementError, match=r"no \['z'\]"):
        next(iter(ShardedLoader([{"x": t}], {"z": spec})))
    with pytest.raises(PlacementError, match="has to cut dim 0"):
        ShardingSpec(mesh, (None, "tp"), minibatch=True).slice(t)


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_layers_and_loaders_on_ranks():
    _specs_and_loader()
    _uneven_sizes()
    return _sequence_shards()
