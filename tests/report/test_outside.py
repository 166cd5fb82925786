"""Collectives outside of graphs are counted, once, and never as nothing where nothing is known of them."""

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dtensor_compile import explain
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.report.recorded import recorded_stock
from tests.report.test_table import cell

RANKS = 4
PARAMETERS = 2 * (8 * 8 + 8)


@pytest.fixture
def mesh():
    with simulated_job(RANKS, 0):
        yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))


def layers():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))


class Inner(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).sum()


def test_stock_sends_what_the_hooks_of_fully_shard_send(mesh):
    model = layers()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    report = explain(Inner(model), stock=True)(torch.randn(4, 8))
    whole = PARAMETERS // RANKS * (RANKS - 1) * 4  # gathered twice, reduced once
    stock = report.stock
    assert (stock.totals.all.bytes, stock.outside.bytes) == (3 * whole, 3 * whole)
    assert {total.name: total.bytes for total in stock.totals.by_phase} == {"forward": whole, "backward": 2 * whole}
    assert {c.mesh_dim for c in stock.collectives} == {"dp"} and all(c.graph is None for c in stock.collectives)
    assert {c.source.code for c in stock.collectives if c.phase == "forward"} == {"return self.inner(x).sum()"}
    assert report.ours.outside is None and cell(report, "outside of graphs").startswith("not known")
    stock = dataclasses.replace(report, ours=stock, stock=None)
    assert cell(stock, "outside of graphs") == f"{len(stock.ours.collectives)} collectives, {3 * whole:,} bytes"
    assert cell(stock, "  exposed").startswith("at most ") and not cell(report, "  exposed").startswith("at most")


def test_stock_sends_what_the_reducer_of_ddp_sends(mesh):
    model = DistributedDataParallel(layers())
    stock = explain(model, stock=True)(torch.randn(4, 8)).stock
    reduced = [c for c in stock.collectives if c.kind == "all_reduce"]
    assert sum(c.bytes for c in reduced) == 2 * (RANKS - 1) * PARAMETERS * 4 // RANKS
    assert {c.phase for c in reduced} == {"backward"}


def test_what_runs_between_graphs_is_counted_and_what_graphs_send_is_not_counted_again(mesh):
    x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]).requires_grad_()

    @torch.compiler.disable
    def between(x):
        return x.redistribute(placements=[Replicate()]) * 2

    def step(x):
        whole = x.redistribute(placements=[Replicate()])
        return whole.sum() + between(x + 1).sum()

    recording = recorded_stock(step, lambda compiled: compiled(x).sum().backward())
    (outside,) = recording.outside.forward
    sent = 8 * 4 // RANKS * (RANKS - 1) * 4
    assert (outside.kind, outside.bytes, outside.mesh_dim) == ("all_gather", sent, "dp")
    assert outside.where.endswith("return x.redistribute(placements=[Replicate()]) * 2")
    assert not recording.outside.backward  # of a replicated gradient each rank keeps its shard
    side = recording.report().ours
    assert side.totals.all.count == len(recording.collectives) + 1
    assert side.totals.all.bytes == recording.bytes_sent + sent
    assert recording.bytes_sent > 0


def test_watching_does_not_make_stock_compile_again(mesh):
    x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])

    def calls_three_times(compiled):
        for _ in range(3):
            compiled(x)

    recording = recorded_stock(lambda x: (x * 2).redistribute(placements=[Replicate()]).to_local(), calls_three_times)
    assert recording.outside.forward == [] and len(recording.compilations) == 1 and len(recording.collectives) == 1
