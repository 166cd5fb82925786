"""Regions marked with torch's nested_compile_region over DTensors: eager's numbers, compiled once where they can be."""

import pytest
import torch
from torch import nn

import dtensor_compile
from dtensor_compile.stages.compiling import key_of
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.compare_values import compare_values
from tests.cases import needs
from tests.variables.test_equal_blocks import Block, Model, batch, sharded, step, tensor_parallel

pytestmark = needs("marked regions over DTensors")


class Region(Block):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return super().forward(x)


class Nested(Model):
    """The region is a function that calls a block."""

    def __init__(self):
        super().__init__()
        self.calls = [torch.compiler.nested_compile_region(lambda x, block=block: block(x)) for block in self.blocks]

    def forward(self, x):
        x = self.stem(x)
        for call in self.calls:
            x = call(x)
        return self.head(x)


def both(make, **options):
    """Differences between two eager steps and compiled ones, and the decisions about blocks."""
    results = []
    for run_of in (
        lambda model: model,
        lambda model: torch.compile(model, backend="dtensor_aten", fullgraph=True, options={"strict": True, **options}),
    ):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        run = run_of(model)
        with dtensor_compile.record() as recording:
            results.append([step(run, model, batch()) for _ in range(2)])
    return compare_values("step", *results), [d.reason for d in recording.decisions if d.kind == "blocks"]


@on_ranks(2)
def test_regions_are_compiled_once():
    """Without the option ``blocks``, since the program marks them; not if it says ``each``."""
    mesh = make_mesh((2,), ("tp",))
    for layout in (tensor_parallel, sharded):
        different, decisions = both(lambda layout=layout: layout(Model(block=Region), mesh))
        assert not different, layout
        assert decisions[-1] == "4 equal calls are compiled once", (layout, decisions)
    assert both(lambda: tensor_parallel(Model(block=Region), mesh), blocks="each") == ([], [])
    different, decisions = both(lambda: tensor_parallel(Model(), mesh))  # no region
    assert not different and "compiled once" not in str(decisions)


@on_ranks(2)
def test_marks_are_part_of_the_key_of_caches():
    """A graph from a cache would call other collectives than one that a rank without it compiles."""
    mesh, keys = make_mesh((2,), ("tp",)), []

    def keep(this):
        keys.append(key_of(this))
        return this.program

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("dtensor_compile.backend.compile_program", keep)
        for block in (Block, Region, Region):
            torch._dynamo.reset()
            torch.compile(tensor_parallel(Model(block=block), mesh), backend="dtensor", fullgraph=True)(batch())
    assert keys[0] != keys[1] == keys[2]


@on_ranks(2)
def test_regions_that_are_no_forward_are_part_of_the_program():
    different, decisions = both(lambda: tensor_parallel(Nested(), make_mesh((2,), ("tp",))))
    assert not different
    assert any("it is a marked region, but not the forward" in reason for reason in decisions), decisions


@on_ranks(1)
def test_regions_over_plain_tensors_are_torchs():
    graphs = []

    def keep(gm, inputs):
        graphs.append([str(node.target) for node in gm.graph.nodes])
        return gm

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("dtensor_compile.backend.compile_program", lambda this: keep(this.program, this.inputs))
        torch.compile(Model(block=Region), backend="dtensor", fullgraph=True)(batch())
    assert graphs[0].count("invoke_subgraph") == 4, graphs


@torch.compiler.nested_compile_region
def doubled(x):
    return (x * 2).relu()


class Doubling(nn.Module):
    """A region that takes a DTensor without a module that has one."""

    def forward(self, x):
        return doubled(x)


@on_ranks(2)
def test_regions_that_take_dtensors():
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = make_mesh((2,), ("tp",))
    torch._dynamo.reset()
    x = distribute_tensor(batch(), mesh, [Shard(0)])
    ours = torch.compile(Doubling(), backend="dtensor_aten", fullgraph=True)(x)
    assert ours.placements == x.placements and torch.equal(ours.to_local(), Doubling()(x).to_local())
