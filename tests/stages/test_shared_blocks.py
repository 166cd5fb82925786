"""Equal blocks that are compiled once: eager's numbers, one graph for all calls, and what has none says why."""

import operator
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dtensor_compile
from dtensor_compile.compat.aot.fx import CALL, called_graphs
from dtensor_compile.graph.inline_subgraph import is_whole, nodes_with_blocks
from dtensor_compile.recording.graph_log import GraphLog
from dtensor_compile.runtime.collective_agreement import Agreement
from dtensor_compile.stages import lowered
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks
from dtensor_compile.testing.compare_values import compare_values
from tests.cases import mostly_slow, needs
from tests.variables.test_equal_blocks import DIM, LAYOUTS, Block, Model, batch, step, tensor_parallel

pytestmark = needs("equal blocks traced once")

OPTIONS = {"blocks": "once", "strict": True}


def compiled(model, **options):
    return torch.compile(model, backend="dtensor_aten", fullgraph=True, options={**OPTIONS, **options})


class Graphs:
    """The lowered graphs: how many each one calls, and the collectives that ranks are told of."""

    def __init__(self, monkeypatch):
        self.called, self.noted = [], []
        note = Agreement.note

        def noted(agreement, graph):
            self.noted.append(sum("all_reduce" in str(node.target) for node in nodes_with_blocks(graph)))
            return note(agreement, graph)

        def lower(graph, this, stock=lowered.lower_graph):
            stock(graph, this)
            if is_whole(graph):
                self.called.append(len(called_graphs(graph.owning_module)))

        monkeypatch.setattr(Agreement, "note", noted)
        monkeypatch.setattr("dtensor_compile.stages.compiling.lower_graph", lower)


def both(model, make, runs=2, **options):
    """Differences between eager steps and compiled ones, from equal states."""
    results = []
    for run_of in (lambda model: model, lambda model: compiled(model, **options)):
        torch.manual_seed(0)
        this = make()
        run = run_of(this)
        results.append([step(run, this, batch() * (i + 1)) for i in range(runs)])
        results[-1].append({name: value.clone() for name, value in this.named_buffers()})
    return compare_values("step", *results)


@pytest.mark.slow
@on_ranks(2)
def test_layouts_have_the_numbers_of_eager():
    mesh = make_mesh((2,), ("dp",))
    for layout in LAYOUTS:
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as monkeypatch:
            graphs = Graphs(monkeypatch)
            assert not both(layout, lambda layout=layout: layout(Model(), mesh))
        # what packs and adds a bucket of gradients is called, too
        assert graphs.called == [1, 3 if layout in LAYOUTS[1:3] else 1], (layout, graphs.called)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_a_bucket_are_those_of_blocks_one_by_one(dtype):
    run_on_ranks(2, gradients_of_buckets, dtype)


def gradients_of_buckets(dtype):
    """Through Inductor: bit by bit, also when they are accumulated, each in memory of its own (those of the uneven head
    are views of one sum, as in eager)."""
    mesh, found = make_mesh((2,), ("dp",)), []
    for blocks in ("each", "once"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        model = Model(3)
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        run = torch.compile(model, backend="dtensor", fullgraph=True, options={"blocks": blocks, "strict": True})
        for _ in range(2):
            run(batch()).sum().backward()
        shards = [parameter.grad.to_local() for parameter in model.blocks.parameters()]
        held = {shard.untyped_storage().data_ptr(): shard.untyped_storage().nbytes() for shard in shards}
        assert (len(held), sum(held.values())) == (len(shards), sum(shard.nbytes for shard in shards))
        found.append(shards)
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@on_ranks(2)
def test_ranks_are_told_of_the_collectives_of_every_call():
    noted = {}
    for blocks in ("each", "once"):
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as monkeypatch:
            graphs = Graphs(monkeypatch)
            assert not both("", lambda: tensor_parallel(Model(6), make_mesh((2,), ("tp",))), blocks=blocks)
        noted[blocks] = graphs.noted
    assert noted["once"] == noted["each"] and noted["once"][0] >= 6


def sums(side):
    """What a side of a report says of the communication of a model."""
    modules = {total.name: (total.count, total.bytes) for total in side.totals.by_module}
    captured = sum(r.bytes_before for r in side.redistributions), sum(r.bytes for r in side.redistributions)
    return modules, [graph.phase for graph in side.graphs], captured


def recorded(layout, backend, blocks, mesh):
    """The recording of a step of a model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = layout(Model(), mesh)
    with dtensor_compile.record() as recording:
        run = torch.compile(model, backend=backend, fullgraph=True, options={**OPTIONS, "blocks": blocks})
        run(batch()).sum().backward()
    assert [graph.name for graph in recording.graphs] == ["forward", "backward"]
    return recording


@pytest.mark.parametrize(
    "layout",
    mostly_slow(LAYOUTS, tensor_parallel),
)
def test_a_recording_is_that_of_every_block(layout):
    recording_of_every_block(layout)


@on_ranks(2)
def recording_of_every_block(layout):
    found, mesh = {}, make_mesh((2,), ("dp",))
    for blocks in ("each", "once"):
        found[blocks] = recorded(layout, "dtensor_aten", blocks, mesh).report(cluster="h100").ours
    each, once = (sums(found[blocks]) for blocks in ("each", "once"))
    if layout.__name__ == "checkpointed":  # a bias that no backward needs is not gathered again with the others
        assert found["each"].totals.all.bytes - found["once"].totals.all.bytes == DIM // 2 * 4
        each, once = each[1:2], once[1:2]
    assert once == each, f"{once} is not {each}"
    assert "equal calls are compiled once" in str([d.reason for d in found["once"].decisions if d.kind == "blocks"])


class Dropping(Block):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


class Counting(nn.Module):
    """Writes to a buffer of the module and to its argument."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        y.mul_(2)
        return y + self.mean


class Returning(nn.Module):
    """Returns views: of its argument, of what it computes, and one of another."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        return y, y[:2], x.t()


class Taking(Model):
    def __init__(self):
        super().__init__(block=Returning)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            y, part, turned = block(x)
            x = y + turned.t() + part.sum()
        return self.head(x)


class Inside(Model):
    """Blocks in another state of torch than the region."""

    def forward(self, x):
        x = self.stem(x)
        with torch.no_grad():
            for block in self.blocks:
                x = x + block(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.float())


@on_ranks(1)
def test_programs():
    for make in (lambda: Model(block=Dropping), lambda: Model(block=Counting), Taking, Inside):
        torch._dynamo.reset()
        assert not both("", make)


class Viewing(nn.Module):
    """Saves views: of its argument and of what it computes, and one more than once."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        gate, y = self.up(torch.tanh(x)).view(2, -1, 2 * DIM).chunk(2, -1)
        y = (gate.sigmoid() * y).transpose(0, 1).contiguous()
        return x + self.down(y).transpose(0, 1).reshape(x.shape) * x[:, :1]


@on_ranks(1)
def test_views_are_inside_of_blocks():
    """Around the calls, no operator makes a view that the backward graph of the block makes as well."""
    around = []

    def lower(graph, this, stock=lowered.lower_graph):
        stock(graph, this)
        if is_whole(graph):
            calls = [place for place, node in enumerate(graph.nodes) if node.target is CALL]
            between = list(graph.nodes)[calls[0] : calls[-1]]
            around.append({node.target for node in between if node.op == "call_function"})

    torch._dynamo.reset()
    with mock.patch("dtensor_compile.stages.compiling.lower_graph", lower):
        assert not both("", lambda: Model(block=Viewing))
    assert around == [{CALL, operator.getitem}] * 2


@on_ranks(1)
def test_inference():
    torch._dynamo.reset()
    model = Model()
    with torch.no_grad():
        assert not compare_values("inference", model(batch()), compiled(model)(batch()))


@on_ranks(2)
def test_placements_that_change_from_call_to_call():
    """The first call takes a shard and returns a partial sum, which the others take and return."""
    mesh = make_mesh((2,), ("tp",))

    class Summing(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
            parallelize_module(
                self,
                mesh,
                {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)},
            )

        def forward(self, x):
            return self.down(self.up(x).relu())

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Summing() for _ in range(5))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.full_tensor()

    def run(run_of):
        torch.manual_seed(0)
        model = Chain()
        x = distribute_tensor(batch(), mesh, [Shard(0)]).requires_grad_()
        run_of(model)(x).square().sum().backward()
        return x.grad, [parameter.grad for parameter in model.parameters()]

    torch._dynamo.reset()
    with dtensor_compile.record() as recording:
        eager, ours = run(lambda model: model), run(compiled)
    different = compare_values("step", eager, ours)
    assert not different, (different, eager[0], ours[0])
    assert isinstance(ours[0], DTensor)
    # Calls that get other gradients than the first are compiled one by one: earlier records of them are discarded.
    assert [graph.name for graph in recording.graphs] == ["forward", "backward"]
    assert (
        len(recording.redistributions)
        == len(recording.captured)
        == len(set(r.number for r in recording.redistributions))
    )


class Logged(Model):
    """Makes a module in the region, of which torch notes that it is used."""

    def forward(self, x):
        return super().forward(nn.Identity()(x))


class Autocast(Model):
    def forward(self, x):
        x = self.stem(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return self.head(x.float())


@on_ranks(1)
def test_what_changes_the_state_of_torch_and_what_does_not():
    decisions = []
    for make in (Logged, Autocast):
        torch._dynamo.reset()
        with mock.patch.object(GraphLog, "decided", lambda self, made: decisions.extend(map(str, made))):
            assert not both("", make)
    about = [text for text in decisions if "equal calls" in text]
    assert ["compiled once" in text for text in about] == [True, False]
    assert "changes the state of torch around them" in about[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [tensor_parallel, LAYOUTS[1]])
def test_a_recording_of_compiled_kernels(layout):
    recording_of_kernels(layout)


@on_ranks(2)
def recording_of_kernels(layout):
    """Order and times are those of the kernels of the graph and of each call of a block; its memory is simulated."""
    found, mesh = {}, make_mesh((2,), ("dp",))
    for blocks in ("each", "once"):
        recording = recorded(layout, "dtensor", blocks, mesh)
        side = recording.report(cluster="h100").ours
        assert {graph.rests_on for graph in side.graphs} == {"kernels"}
        for graph in recording.graphs:
            assert [o.starts for o in graph.operations if o.starts is not None] == list(range(len(graph.collectives)))
        spans = {span.module for graph in side.graphs for span in graph.spans if span.stream == "compute"}
        found[blocks] = sums(side), {name for name in spans if name.startswith("blocks")}
        if blocks == "once":
            calls = [task for graph in recording.graphs for task in graph.order.tasks if task.inside]
            assert len(calls) >= 4
    assert found["once"] == found["each"], found
