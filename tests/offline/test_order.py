"""The order of the code that runs: read from what Inductor wrote, on an emulated H100."""

import dataclasses
import pathlib
import sys

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import dtensor_compile
from dtensor_compile import offline
from dtensor_compile.compat.distributed.device_meshes import group_named
from dtensor_compile.ir.mesh import group_dim_name
from dtensor_compile.report.written_code import written_collectives

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools" / "bench"))
from configurations import RANKS, SMALL, build  # noqa: E402


def compiled(name, layers, change=lambda built: None):
    """Collectives of forward and backward with their mesh dims, as written, and the recording."""
    with offline.job(RANKS), offline.device("h100") as device:
        built = build(name, "cuda", dataclasses.replace(SMALL, layers=layers))
        change(built)
        with dtensor_compile.record() as recording:
            built.step(lambda f: torch.compile(f, backend="dtensor", fullgraph=True, **built.options))
        written = [
            [(c, group_dim_name(group_named(c.group))) for c in written_collectives(graph.source)]
            for graph in device.graphs
        ]
        return written, recording


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "fully_shard x tensor parallel: plain",
        "fully_shard x tensor parallel: uneven",
        "fully_shard x tensor parallel: sharded loss",
    ],
)
def test_data_parallel_collectives_run_beside_kernels(name):
    graphs, recording = compiled(name, layers=4)
    data_parallel = [collective for written in graphs for collective, dim in written if dim != "tp"]
    assert len(data_parallel) <= 3 * 5  # four blocks and the root
    idle = [collective for collective in data_parallel if not collective.between]
    assert len(idle) <= 1, [c.name for c in idle]  # the last reduction: nothing is left to compute
    assert all(graph.order is not None for graph in recording.graphs)


@pytest.mark.slow
def test_decisions_and_report_are_of_the_written_code():
    graphs, recording = compiled("fully_shard x tensor parallel: plain", layers=2)
    for written, record in zip(graphs, recording.graphs, strict=True):
        kinds = [
            c.name.replace("_into_tensor", "").replace("_tensor", "").replace("_coalesced", "").rstrip("_")
            for c, _ in written
        ]
        assert [c.kind for c in record.collectives] == kinds
        starts = [index for index, o in enumerate(record.operations) if o.starts is not None]
        for number, (collective, _) in enumerate(written):
            wait = next(i for i, o in enumerate(record.operations) if o.waits_for == number)
            between = [o for o in record.operations[starts[number] : wait] if o.starts is None and o.waits_for is None]
            assert bool(between) <= bool(collective.between)
    hidden = [d for d in recording.decisions if d.kind == "schedule" and d.reason.startswith("hidden")]
    busy = sum(bool(c.between) for written in graphs for c, _ in written)
    assert 0 < len(hidden) <= busy
    assert all(graph.rests_on == "kernels" for graph in recording.report().ours.graphs)


def test_times_of_a_graph_without_collectives_are_those_of_its_kernels():
    """They were those of operators, each of which writes its result to memory."""
    with offline.job(1), offline.device("h100"):
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.randn(256, 4096, device="cuda"), mesh, [Replicate()])
        with dtensor_compile.record() as recording:
            torch.compile(lambda x: (x.sin() * x).tanh() + 1, backend="dtensor")(x)
    (graph,) = recording.report().ours.graphs
    assert graph.rests_on == "kernels" and not any(d.kind == "schedule" for d in recording.decisions)
    assert [span.name for span in graph.spans] == ["fused add mul sin tanh"]


@pytest.mark.slow
def test_a_collective_of_the_program_constrains_waits_alone():
    """A loss that the program itself sums over the data-parallel ranks: gathers and reductions beside it still run
    beside kernels.
    """

    def sums(built):
        loss, mesh = built.loss, next(p for p in built.model.parameters()).device_mesh["dp"]

        def with_mean(*args):
            own = loss(*args)
            return own + 0.0 * funcol.all_reduce(own.detach(), "avg", (mesh, 0))

        built.loss = with_mean

    graphs, recording = compiled("fully_shard x tensor parallel: plain", 4, sums)
    assert all(graph.order is not None for graph in recording.graphs)
    idle = [c.name for written in graphs for c, dim in written if dim != "tp" and not c.between]
    assert len(idle) <= 3, idle


def test_sums_of_the_gradients_of_a_block_are_one_collective():
    """Gradients of its norms, partial over tensor-parallel ranks: they are traced when all gradients of the block are
    there."""
    with offline.job(RANKS):
        built = build("fully_shard x tensor parallel: plain", "cpu", dataclasses.replace(SMALL, layers=2))
        with dtensor_compile.record() as recording:
            built.step(lambda f: torch.compile(f, backend="dtensor_aten", fullgraph=True))
    sums = [c for graph in recording.graphs for c in graph.collectives if c.kind == "all_reduce"]
    assert [(c.mesh_dim, c.module, len(c.carries)) for c in sums] == [
        ("tp", "model.blocks.1", 2),
        ("tp", "model.blocks.0", 3),  # and that of the norm before the output
    ]
