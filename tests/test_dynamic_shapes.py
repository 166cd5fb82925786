"""Batch sizes that vary: redistributions in forward and backward follow them, also where they do not divide by the mesh."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtensor_compile

from dtensor_compile.compat import counters
from dtensor_compile.compat.fake_group import simulated_job
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks


@on_ranks(2)
def test_redistributions_of_a_batch_that_varies():
    mesh = make_mesh((2,), ("tp",))
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).requires_grad_()

    def block(x):
        return F.gelu(F.linear(x, weight)).redistribute(placements=[Shard(0)]).redistribute(placements=[Shard(1)])

    counters.reset()
    run = torch.compile(block, backend="dtensor_aten", fullgraph=True)
    for batch in (4, 6, 9, 8):
        full, gradients = torch.randn(batch, 8), []
        for function in (block, run):
            x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
            out = function(x)
            out.to_local().square().sum().backward()
            gradients.append((out.to_local().detach(), x.grad.full_tensor(), weight.grad.full_tensor().clone()))
            weight.grad = None
        torch.testing.assert_close(*gradients)
    assert counters.graphs() <= 4  # at most one for each size


@on_ranks(2)
def test_a_result_that_is_a_view_of_an_input_when_the_batch_changes():
    mesh = make_mesh((2,), ("tp",))
    compiled = torch.compile(lambda x: (x.view(x.shape[0], 2, 2), x.transpose(0, 1), x * 2), backend="dtensor_aten", fullgraph=True)
    for batch in (4, 6, 8):
        x = distribute_tensor(torch.randn(batch, 4), mesh, [Shard(0)]).requires_grad_()
        view, turned, _ = compiled(x)
        assert torch.equal(view.to_local(), x.view(batch, 2, 2).to_local())
        assert torch.equal(turned.to_local(), x.transpose(0, 1).to_local())
        assert view.to_local().data_ptr() == x.to_local().data_ptr()
        (view.to_local().square().sum() + turned.to_local().sum()).backward()
        torch.testing.assert_close(x.grad.to_local(), 2 * x.detach().to_local() + 1)


def of_each_size(sizes):
    """The collectives that each size compiles, after a comparison with eager."""
    mesh, compiled_for = make_mesh((3,), ("tp",)), []
    torch._dynamo.reset()

    def sums(x, w):
        return torch.relu(x @ w).redistribute(placements=[Replicate()]).sum(0)

    compiled = torch.compile(sums, backend="dtensor_aten", fullgraph=True)
    for size in sizes:
        torch.manual_seed(size)
        x, w = torch.randn(size, 4), torch.randn(4, 4)
        args = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()])
        with dtensor_compile.record() as recording:
            result = compiled(*args)
        torch.testing.assert_close(result.to_local(), sums(*args).to_local())
        compiled_for.append([c.kind for c in recording.collectives])
    return compiled_for


@pytest.mark.parametrize("sizes", [(7, 9), (9, 7, 8, 12, 3, 2), (6, 3, 9, 0, 1, 2)])
def test_shards_that_vary_on_some_ranks_only(sizes):
    """Of 7 rows and then 9, the shard of the last rank of three grows and the others stay: all ranks trace with symbols."""
    for found in zip(*run_on_ranks(3, of_each_size, sizes)):
        assert len({tuple(kinds) for kinds in found if kinds}) <= 1  # a rank that has a graph for the size compiles none


def test_lookups_by_indices_in_strided_shards():
    """The cost of sending strided shards of a size that varies is counted without their offsets, which are in no tensor with values."""
    with simulated_job(4, 0):
        mesh = make_mesh((2, 2), ("dp", "tp"))
        x = distribute_tensor(torch.randn(8), mesh, [Replicate(), Shard(0)])
        indices = distribute_tensor(torch.zeros(4, 3, dtype=torch.long), mesh, [Shard(1), Shard(0)])

        def found(x, i):
            return x.index_select(0, i.flatten())

        compiled = torch.compile(found, backend="dtensor_aten", fullgraph=True, dynamic=True)(x, indices)
        assert compiled.placements == found(x, indices).placements and compiled.shape == (12,)
