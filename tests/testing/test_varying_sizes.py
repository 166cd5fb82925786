"""Sizes that vary along a sharded dim: right results for each, and how many graphs they cost."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.compat.distributed.rank_threads import run_in_threads
from dtensor_compile.testing import make_mesh


def step(x, w):
    return torch.relu(x @ w).redistribute(placements=[Replicate()]).sum(0)


def made(size, mesh):
    torch.manual_seed(size)
    x, w = torch.randn(size, 8), torch.randn(8, 8)
    return [distribute_tensor(v, mesh, [p], src_data_rank=None) for v, p in ((x, Shard(0)), (w, Replicate()))]


def graphs(sizes, rank, marked=False, backend="dtensor_aten"):
    """How many graphs each size costs on that rank of two."""
    torch.compiler.reset()
    with simulated_job(2, rank):
        mesh, costs = make_mesh((2,), ("tp",)), []
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        for size in sizes:
            x, w = made(size, mesh)
            if marked:
                torch._dynamo.mark_dynamic(x, 0)
            before = counters["stats"]["unique_graphs"]
            compiled(x, w)
            costs.append(counters["stats"]["unique_graphs"] - before)
    return costs


@pytest.mark.parametrize("rank", [0, 1])
def test_sizes_that_divide_cost_one_graph_more(rank):
    assert graphs([4, 6, 8, 10, 64], rank) == [1, 1, 0, 0, 0]
    assert graphs([4, 6, 8, 10, 64], rank, marked=True) == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "rank, sizes",
    [
        pytest.param(0, [4, 6, 9, 8, 3, 5], id="0-sizes0", marks=pytest.mark.slow),
        pytest.param(0, [9, 7, 4, 6], id="0-sizes1"),
        pytest.param(1, [4, 6, 9, 8, 3, 5], id="1-sizes0"),
        pytest.param(1, [9, 7, 4, 6], id="1-sizes1", marks=pytest.mark.slow),
    ],
)
def test_sizes_that_do_and_do_not_divide_cost_what_they_cost_stock(rank, sizes):
    """torch pads uneven shards and guards whether they are; a shard of size 1 (rank 1 of 3 rows) has a graph of its
    own.
    """
    ours = graphs(sizes, rank)
    assert ours == graphs(sizes, rank, backend="aot_eager") and sum(ours) <= (4 if 3 in sizes and rank else 3)


@pytest.mark.parametrize("marked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_values_of_every_size(marked):
    def body(rank):
        mesh, wrong = make_mesh((3,), ("tp",)), []
        compiled = torch.compile(step, backend="dtensor_aten", fullgraph=True)
        for size in (9, 12, 6, 1, 0, 2, 9):
            x, w = made(size, mesh)
            if marked and size > 3:  # torch refuses a marked dim of shards of size 1
                torch._dynamo.mark_dynamic(x, 0)
            wanted = torch.relu(x.full_tensor() @ w.to_local()).sum(0)
            if not torch.allclose(compiled(x, w).to_local(), wanted, atol=1e-4):
                wrong.append(size)
        return wrong

    assert run_in_threads(3, body) == [[], [], []]
