"""Mixtures of experts: how many tokens go to which rank is only known from the data; the program is one graph all the
same.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch._dynamo.utils import counters

from dtensor_compile.testing import on_ranks
from tests.cases import mostly_slow


def tokens(n, *, requires_grad=True):
    generator = torch.Generator().manual_seed(n * 10 + dist.get_rank())
    return torch.randn(n, 4, generator=generator).requires_grad_(requires_grad)


def experts_of(n, experts):
    """One expert for each token; ranks differ in how many go where."""
    return torch.randint(0, experts, (n,), generator=torch.Generator().manual_seed(n + 7 * dist.get_rank()))


def send(x, outs, ins):
    return funcol.all_to_all_single_autograd(x, outs, ins, dist.group.WORLD)


def counts_of(ids, n):
    """What this rank sends, and what it gets."""
    counts = torch.bincount(ids, minlength=n)
    received = torch.empty_like(counts)
    work = dist.all_to_all_single(received, counts, async_op=True)
    work.wait()
    return counts, received


def in_place(x, ids, w):
    counts, received = counts_of(ids, dist.get_world_size())
    ins, outs = counts.tolist(), received.tolist()
    y = x.new_empty(sum(outs), x.shape[1])
    dist.all_to_all_single(y, x.detach()[ids.argsort(stable=True)], outs, ins)
    return y @ w[0]


def there_and_back(x, ids, w):
    n = dist.get_world_size()
    counts, received = counts_of(ids, n * 2)
    ins, outs = counts.view(n, 2).sum(1).tolist(), received.view(n, 2).sum(1).tolist()
    order = ids.argsort(stable=True)
    parts = torch.split(send(x[order], outs, ins), received.tolist())
    y = torch.cat([torch.relu(part @ w[i % 2]) for i, part in enumerate(parts)])
    return torch.zeros_like(x).index_add(0, order, send(y, ins, outs))


def top_two(x, ids, w):
    n = dist.get_world_size()
    weights, chosen = (x @ w[0][:, :n]).softmax(-1).topk(2, -1)
    flat = chosen.view(-1)
    order = flat.argsort(stable=True)
    counts, received = counts_of(flat, n)
    ins, outs = counts.tolist(), received.tolist()
    y = torch.relu(send(x[order // 2], outs, ins) @ w[1])
    y = send(y, ins, outs) * weights.view(-1)[order][:, None]
    return torch.zeros_like(x).index_add(0, order // 2, y)


def all_to_the_first(x, ids, w):
    counts, received = counts_of(ids * 0, dist.get_world_size())
    return torch.relu(send(x, received.tolist(), counts.tolist()) @ w[0]).sum(0)


def one_hot_counts(x, ids, w):
    counts = F.one_hot(ids, 3).sum(0)
    parts = torch.split(x[ids.argsort(stable=True)], counts.tolist())
    return torch.cat([part @ w[i % 2] for i, part in enumerate(parts)])


def by_mask(x, ids, w):
    out = torch.zeros_like(x)
    for i in range(2):
        (rows,) = torch.where(ids == i)
        out = out.index_add(0, rows, x[rows] @ w[i])
    return out


def follows_eager(program, experts):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(program, backend="dtensor_aten", fullgraph=True)
    for n in (10, 10, 14, 18):  # a new number of tokens compiles once more, other splits never
        results = []
        for run in (program, compiled):
            x = tokens(n)
            w = torch.linspace(-1, 1, 32).view(2, 4, 4).requires_grad_()
            y = run(x, experts_of(n, experts), w)
            y.square().sum().backward()
            results.append([y.detach(), x.grad, w.grad])
        for eager, ours in zip(*results):
            assert (eager is None) == (ours is None)
            if eager is not None:
                torch.testing.assert_close(eager, ours)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(
    "program",
    mostly_slow(
        (in_place, there_and_back, top_two, all_to_the_first, one_hot_counts, by_mask), there_and_back, one_hot_counts
    ),
)
@on_ranks(2)
def test_one_graph(program):
    follows_eager(program, {there_and_back: 4, one_hot_counts: 3}.get(program, 2))


@pytest.mark.slow
@on_ranks(4)
def test_four_ranks():
    follows_eager(there_and_back, 8)


@on_ranks(2)
def test_more_counts_than_asked_for_are_an_error_and_not_left_out():
    program = lambda x, ids: x * len(torch.bincount(ids, minlength=2).tolist())  # noqa: E731
    compiled = torch.compile(program, backend="dtensor_aten", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2), torch.tensor([0, 1, 1])), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="larger minlength"):
        compiled(torch.ones(2), torch.tensor([0, 2, 1]))


@on_ranks(2)
def test_a_length_that_nothing_says_ends_the_graph_once():
    torch._dynamo.reset()
    counters.clear()

    def program(x, ids):
        _, counts = torch.unique(ids, return_counts=True)
        return [part.sum() for part in torch.split(x, counts.tolist())]

    x, ids = tokens(6), torch.tensor([0, 0, 1, 3, 3, 3])
    for eager, ours in zip(program(x, ids), torch.compile(program, backend="dtensor_aten")(x, ids), strict=True):
        torch.testing.assert_close(eager, ours)
    assert sum(counters["graph_break"].values()) == 1
