"""Collectives outside of graphs are counted, once, and never as nothing where nothing is known of them."""

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dtensor_compile import explain
from dtensor_compile.cli import main
from dtensor_compile.compat.fake_group import simulated_job
from dtensor_compile.report.explain import recorded
from dtensor_compile.report.model import from_json
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
    assert (stock.totals.all.bytes, stock.outside.bytes, stock.outside.counted) == (3 * whole, 3 * whole, True)
    assert {total.name: total.bytes for total in stock.totals.by_phase} == {"forward": whole, "backward": 2 * whole}
    assert {c.mesh_dim for c in stock.collectives} == {"dp"} and all(c.graph is None for c in stock.collectives)
    assert {c.source.code for c in stock.collectives if c.phase == "forward"} == {"return self.inner(x).sum()"}
    assert report.ours.outside.count == 0 and report.ours.totals.all.bytes > 0
    stock = dataclasses.replace(report, ours=stock, stock=None)
    assert cell(stock, "outside of graphs") == f"{len(stock.ours.collectives)} collectives, {3 * whole:,} bytes"
    assert cell(stock, "  exposed").startswith("at most ") and not cell(report, "  exposed").startswith("at most")


def test_stock_sends_what_the_reducer_of_ddp_sends(mesh):
    model = DistributedDataParallel(layers())
    stock = explain(model, stock=True)(torch.randn(4, 8)).stock
    reduced = [c for c in stock.collectives if c.kind == "all_reduce"]
    assert sum(c.bytes for c in reduced) == 2 * (RANKS - 1) * PARAMETERS * 4 // RANKS
    assert {c.phase for c in reduced} == {"backward"}


@pytest.mark.parametrize("kernels", ["aten", "inductor"])
def test_what_runs_between_graphs_is_counted_and_what_graphs_send_is_not_counted_again(mesh, kernels):
    x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]).requires_grad_()

    @torch.compiler.disable
    def between(x):
        return x.redistribute(placements=[Replicate()]) * 2

    def step(x):
        whole = x.redistribute(placements=[Replicate()])
        return whole.sum() + between(x + 1).sum()

    recording = recorded(step, lambda compiled: compiled(x).sum().backward(), kernels=kernels)
    (outside,) = recording.outside.forward
    sent = 8 * 4 // RANKS * (RANKS - 1) * 4
    assert (outside.kind, outside.bytes, outside.mesh_dim) == ("all_gather", sent, "dp")
    assert outside.where.endswith("return x.redistribute(placements=[Replicate()]) * 2")
    assert not recording.outside.backward  # of a replicated gradient each rank keeps its shard
    side = recording.report().ours
    assert side.totals.all.count == len(recording.collectives) + 1
    assert side.totals.all.bytes == recording.bytes_sent + sent
    assert recording.bytes_sent > 0


SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
step = torch.compile(lambda x: x + 1, backend="aot_eager")
for _ in range(3):
    x = step(torch.ones(8))
    dist.all_reduce(x)
"""


def test_those_of_a_script_are_told_and_not_part_of_one_forward_and_backward(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    assert main(["report", "--save", "out.json", "script.py"]) == 0
    report = from_json((tmp_path / "out.json").read_text())
    assert (report.ours.outside.count, report.ours.outside.bytes, report.ours.outside.counted) == (3, 3 * 8 * 4, False)
    assert report.ours.totals.all.count == 0
    assert "3 collectives, 96 bytes, in all calls together; not counted above" in capsys.readouterr().out
