"""Activation checkpointing over tensor-parallel blocks, and ``local_map``: one graph, like eager."""

import functools

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from dtensor_compile.testing import assert_parity, make_mesh, on_ranks


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        blocks = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2)]
        self.blocks = nn.ModuleList(parallelize_module(block, make_mesh((2,), ("tp",)), plan) for block in blocks)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@on_ranks(2)
def test_checkpoint_over_tensor_parallel_blocks():
    torch.manual_seed(0)
    assert_parity(
        Blocks(), [torch.randn(5, 4, requires_grad=True)], loss=lambda out: out.square().sum(), backend="dtensor_aten"
    )


@on_ranks(2)
def test_local_map():
    mesh = make_mesh((2,), ("tp",))

    @functools.partial(local_map, out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
    def product(x, w):
        return (x @ w).relu()

    torch.manual_seed(0)
    x = DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)]).detach().requires_grad_()
    w = DTensor.from_local(torch.randn(4, 4), mesh, [Replicate()]).detach().requires_grad_()
    loss = lambda out: out.full_tensor().square().sum()  # noqa: E731
    assert_parity(lambda x, w: product(x, w) * 2, [x, w], loss=loss, backend="dtensor_aten")
