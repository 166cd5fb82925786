"""Programs with marks that write in place or draw random numbers: what the plain program computes, on every rank."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtensor_compile import record
from dtensor_compile.spmd import Mesh, mark_sharding
from dtensor_compile.testing import on_ranks
from tests.spmd.test_annotate import compare


def mesh22():
    mesh = Mesh(range(4), (2, 2), ("dp", "tp"))
    mesh.to_device_mesh("cpu")
    return mesh


def leaves(value):
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def same(program, *inputs, marks=None, calls=2):
    """The compiled program gives what the plain one does, and leaves its inputs and torch's generator as that does."""
    torch._dynamo.reset()
    plain = copy.deepcopy(inputs)
    for x, spec in zip(inputs, marks or [("dp", *[None] * (x.dim() - 1)) for x in inputs]):
        mark_sharding(x, mesh22(), spec)
    compiled = torch.compile(program, backend="dtensor_aten", fullgraph=True)
    with record() as recording:
        for call in range(calls):
            results = []
            for run, given in ((program, plain), (compiled, inputs)):
                torch.manual_seed(call)
                results.append([*leaves(run(*given)), *given, torch.rand(2)])
            for want, got in zip(*results, strict=True):
                torch.testing.assert_close(got, want)
    return recording.report().ours


# ---- in place ------------------------------------------------------------------------------------------------------


def _written_intermediates():
    mesh = mesh22()

    def assigned(x):
        h = x * 2
        mark_sharding(h, mesh, ("dp", None))
        h.add_(1)
        h[0] = 5
        h[1:3, 2] += 7
        return h, h.sum()

    def seen_through_a_view(x):
        h = x * 2
        flat, rows = h.view(-1), h[1:3]
        mark_sharding(h, mesh, ("dp", "tp"))
        h.mul_(3)
        rows.add_(1)
        return flat, rows, h

    def base_of_a_view(x):
        h = x * 2
        rows = h[2]
        rows.zero_()
        return h

    def chained(x):
        h = x.clone()
        h = h.add_(1)
        h += x
        return F.relu(h, inplace=True)

    def other_arguments(x):
        out = torch.empty_like(x)
        torch.mul(x, 3, out=out)
        out.copy_(out + x)
        return out.masked_fill_(x > 0, 0.5), out.index_fill_(0, torch.tensor([1]), 2.0)

    for program in (assigned, seen_through_a_view, base_of_a_view, chained, other_arguments):
        same(program, torch.randn(4, 8))
    ours = same(chained, torch.randn(4, 8))
    assert not [d for d in ours.decisions if d.kind == "replicate_fallback"]  # nobody else sees it: it stays in shards


def _written_inputs():
    def added(x, y):
        x.add_(y)
        x += y
        return x * 2

    def through_a_view(x, y):
        x[1].add_(y[0])
        x.view(-1)[3] = 9
        return x + y

    def cache(x, y):
        x[:, 2:4] = y[:, :2]
        return x.sum(1)

    for program in (added, through_a_view, cache):
        same(program, torch.randn(4, 8), torch.randn(4, 8))


def _running_statistics():
    for spec in (("dp", None), (None, "tp"), ("dp", "tp")):
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
        plain, x = copy.deepcopy(model), torch.randn(4, 8)
        mark_sharding(model[0].weight, mesh22(), ("tp", None))
        mark_sharding(x, mesh22(), spec)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="dtensor_aten", fullgraph=True)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), plain(x))
            for got, want in zip(model.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(got, want)


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_writes_in_place():
    _written_intermediates()
    _written_inputs()
    _running_statistics()
    _gradients_of_what_is_mixed()


# ---- random --------------------------------------------------------------------------------------------------------


def _draws():
    def dropped(x):
        h = F.dropout(x * 2, 0.5) + F.dropout2d(x[:, None, :, None], 0.3)[:, 0, :, 0]
        return F.dropout(h, 0.25, True, True), F.dropout(x, 0.5, training=False), F.dropout(x, 0.0)

    def drawn(x):
        return torch.rand_like(x) + x, torch.randn_like(x[:2]), torch.bernoulli(x.sigmoid()), F.rrelu(x, training=True)

    def written(x):
        h = x * 2
        h.normal_()
        return h + x, F.alpha_dropout(x, 0.5)

    def attended(x):
        q = x.view(4, 2, 2, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), F.scaled_dot_product_attention(q, q, q)

    same(drawn, torch.randn(4, 8))
    same(written, torch.randn(4, 8))
    same(attended, torch.randn(4, 8))
    same(dropped, torch.randn(5, 8))
    ours = same(lambda x: F.dropout(x * 2, 0.5).sum(), torch.randn(4, 8))
    assert ours.totals.all.bytes <= 4 and not [
        d for d in ours.decisions if d.kind == "replicate_fallback"
    ]  # at most the sum is sent


def _trained_with_dropout():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(0.1, inplace=True))
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    mark_sharding(model[0].weight, mesh22(), ("tp", None))
    mark_sharding(x, mesh22(), ("dp", None))
    torch._dynamo.reset()
    for run in (plain, torch.compile(model, backend="dtensor_aten", fullgraph=True)):
        torch.manual_seed(5)
        for _ in range(2):
            run(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


class Mixed(nn.Module):
    """Values that stay whole, or fell back to it, beside others that are cut, on their way back."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = self.up(x)
        h[:, 3] = 0.5
        g = self.up(x * 2)
        first = g[0]
        first.mul_(2)
        fallen = torch.special.i0(h * 0.1)  # no rule
        return self.down(torch.cat([h, g]) * fallen.sum() + (g * h).sum())


def _gradients_of_what_is_mixed():
    model, x = Mixed().double(), torch.randn(4, 8, dtype=torch.float64)
    mark_sharding(model.up.weight, mesh22(), ("tp", None))
    mark_sharding(x, mesh22(), ("dp", None))
    compare(model, x)


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_random_numbers_are_those_of_the_plain_program():
    _draws()
    _trained_with_dropout()
