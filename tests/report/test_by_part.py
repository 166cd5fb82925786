"""Reports of models that compile parts one by one: graphs count as often as they run, and the whole is compared."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile import explain
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.compat.release import minor_release
from dtensor_compile.report.by_part import BY_PART
from dtensor_compile.report.chrome_trace import to_trace
from dtensor_compile.report.html import to_html
from dtensor_compile.report.model import from_json, to_json
from dtensor_compile.report.table import console_for, print_report

BLOCKS = 3
DIM = 8


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(DIM, 2 * DIM), torch.nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = torch.nn.ModuleList(Block() for _ in range(BLOCKS)), torch.nn.Linear(DIM, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_method(block):
    block.compile(backend="aot_eager")
    return block


def wrapped(block):
    return torch.compile(block, backend="aot_eager")


def model(compiled, shard, tensor_parallel=False):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = Model()
    for i, block in enumerate(made.blocks):
        if tensor_parallel:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        made.blocks[i] = block = compiled(block)
        if shard:
            fully_shard(block, mesh=mesh["dp"])
    return fully_shard(made, mesh=mesh["dp"]) if shard else made


@pytest.fixture(scope="module", autouse=True)
def job():
    """One for all tests: DTensor remembers meshes, and thereby groups of a job that has ended."""
    with simulated_job(4, 0):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [by_method, wrapped])
def test_a_graph_counts_as_often_as_it_runs(compiled):
    parts = explain(model(compiled, shard=False, tensor_parallel=True), stock=True)(torch.ones(4, DIM))
    whole = explain(model(lambda block: block, shard=False, tensor_parallel=True), stock=True)(torch.ones(4, DIM))
    assert whole.whole is None and [graph.calls for graph in whole.ours.graphs] == [1, 1]
    # The first block gets an input that needs no gradient, and has a graph of its own.
    assert sorted(graph.calls for graph in parts.ours.graphs if graph.phase == "forward") == [1, BLOCKS - 1]
    assert sum(r.bytes_before for r in parts.ours.redistributions if r.phase == "forward") > 0
    for side in (parts.ours, parts.stock):
        (sent,) = {c.bytes // c.calls for c in side.collectives if c.graph is not None and c.phase == "forward"}
        assert sent == 2 * 4 * DIM * 4 // 2  # an all-reduce of a block's result over two ranks
        assert sum(c.calls for c in side.collectives if c.phase == "forward") == BLOCKS
    for total in ("by_phase", "by_kind"):
        assert sum(t.bytes for t in getattr(parts.ours.totals, total)) == parts.ours.totals.all.bytes
    assert parts.whole.totals.all == whole.ours.totals.all
    assert parts.ours.totals.by_phase[0].count >= BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiled",
    [
        by_method,
        pytest.param(
            wrapped,
            marks=pytest.mark.skipif(
                minor_release(torch.__version__) == "2.11", reason="Dynamo of 2.11 does not inline it under fully_shard"
            ),
        ),
    ],
)
def test_what_the_whole_would_gain_is_the_first_row(compiled, capsys):
    report = explain(model(compiled, shard=True))(torch.ones(4, DIM))
    assert report.stock is None
    assert report.ours.outside.count == 3 * (BLOCKS + 1) - 1  # the root is not gathered again
    assert report.ours.totals.all.count == report.ours.outside.count > report.whole.totals.all.count > 0
    row = report.ours.missed[0]
    assert (row.kind, row.before) == (BY_PART, "parts blocks.0, blocks.1, ...")
    assert f"{report.ours.totals.all.count} collectives become {report.whole.totals.all.count}" in row.reason
    assert from_json(to_json(report)) == report
    to_html(report), to_trace(report)
    print_report(report, console_for())
    out = capsys.readouterr().out
    assert "dtensor, by part | dtensor, whole" in out and f"which run {2 * BLOCKS} times" in out


def test_a_whole_that_gains_nothing_is_not_advised():
    report = explain(model(by_method, shard=False))(torch.ones(4, DIM))
    assert "it would gain nothing" in report.ours.missed[0].reason
