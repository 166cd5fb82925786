"""Equal blocks are traced once: the graph, the numbers and the guards are those of a trace of each."""

import contextlib
import difflib
import itertools
import random
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import dtensor_compile
from dtensor_compile import backend
from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.dynamo.replay.call_facts import tensor_facts
from dtensor_compile.compat.dynamo.replay.node_copies import PLACE
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values
from tests.cases import mostly_slow, needs

#: Dynamo before 2.13 has no checks of guards for another module.
pytestmark = needs("equal blocks traced once")

DIM = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.scale = 0.5
        self.register_buffer("shift", torch.full((DIM,), 0.25))

    def forward(self, x, *, bias=None):
        y = self.down(torch.tanh(self.up(self.norm(x)))) * self.scale + self.shift
        return x + y if bias is None else x + y + bias


class Model(nn.Module):
    def __init__(self, count=4, block=Block):
        super().__init__()
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tensor_parallel(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpointed(model, mesh):
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    for block in model.blocks:
        block.__class__ = Checkpointed
    return sharded(model, mesh)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def parametrized(model, mesh):
    tensor_parallel(model, mesh)
    for block in model.blocks:
        parametrize.register_parametrization(block.up, "weight", Halved())
    return model


LAYOUTS = (tensor_parallel, sharded, checkpointed, parametrized)


class Seen:
    """The Dynamo graph of a compilation, and how many calls have a copy of another one's nodes."""

    def __init__(self, program):
        number, self.lines = itertools.count(), []
        inputs = {node: next(number) for node in program.graph.find_nodes(op="placeholder")}
        numbers = {node: f"input {node.meta['example_value'].shape}" for node in inputs if is_tensor(node)}
        numbers = {node: numbers.get(node, "input") for node in inputs}
        for node in program.graph.nodes:
            if node.op != "placeholder":
                numbers[node] = f"%{next(number)}"
                self.lines.append(self._line(node, numbers))
        places = {node.meta[PLACE][:2] for node in program.graph.nodes if PLACE in node.meta}
        self.copies = len([call for _, call in places if call])

    def _line(self, node, numbers):
        value = node.meta.get("example_value")
        facts = tensor_facts(value)[:5] if isinstance(value, torch.Tensor) else type(value)
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: numbers[arg])
        stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        return f"{node.op} {node.target} {args} {facts} {stack}"


def is_tensor(node):
    return isinstance(node.meta.get("example_value"), torch.Tensor)


@contextlib.contextmanager
def watch_programs():
    """Collects what is `Seen` of each graph that is compiled meanwhile."""
    seen, stock = [], backend.compile_program
    with mock.patch.object(backend, "compile_program", lambda this: seen.append(Seen(this.program)) or stock(this)):
        yield seen


def compiled(model, blocks="traced"):
    options = {"blocks": blocks, "strict": True}
    return torch.compile(model, backend="dtensor_aten", fullgraph=True, options=options)


def step(run, model, x):
    model.zero_grad()
    loss = run(x).square().sum()
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def batch():
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@on_ranks(2)
def test_the_graph_and_the_numbers_are_those_of_a_trace_of_each():
    mesh = make_mesh((2,), ("dp",))
    for layout in LAYOUTS:
        expected = None
        for blocks in ("each", "traced"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = layout(Model(), mesh)
            eager = step(model, model, batch())
            with watch_programs() as seen:
                results = step(compiled(model, blocks), model, batch())
            assert not compare_values(layout.__name__, eager, results)
            (this,) = seen
            assert this.copies == (0 if blocks == "each" else 3), (layout, this.copies)
            expected = expected or this.lines
            different = list(difflib.unified_diff(expected, this.lines, lineterm="", n=0))
            assert not different, (layout, different[:8])


def hook(model, block):
    block.up.register_forward_hook(lambda module, args, output: output * 1.5)


def hook_of_the_block(model, block):
    block.register_forward_hook(lambda module, args, output: output * 1.5)


def frozen(model, block):
    block.up.weight.requires_grad_(False)


def other_number(model, block):
    block.scale = 2.0


def other_mode(model, block):
    block.norm = nn.Dropout(0.5).eval()


def tied(model, block):
    block.norm.bias = block.norm.weight


def tied_to_another(model, block):
    block.up.weight = model.blocks[0].up.weight


def without_bias(model, block):
    block.up.bias = None


def other_size(model, block):
    block.up, block.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)


def other_buffer(model, block):
    block.shift = torch.zeros(1)


def own_forward(model, block):
    block.forward = lambda x: x * 3


def other_class(model, block):
    block.__class__ = type("Other", (Block,), {"forward": lambda self, x: Block.forward(self, x) + 1})


def other_submodule(model, block):
    block.norm = nn.RMSNorm(DIM)


def other_epsilon(model, block):
    block.norm.eps = 0.5


def hooks_with_other_values(model, block):
    def scales(by):
        return lambda module, args: (args[0] * (1 if by is None else len(by)),)

    for this in model.blocks:
        this.register_forward_pre_hook(scales(None if this is block else (1, 2)))


MUTATIONS = (
    hook, hook_of_the_block, frozen, other_number, other_mode, tied, tied_to_another, without_bias, other_size,
    other_buffer, own_forward, other_class, other_submodule, other_epsilon,
    hooks_with_other_values,
)  # fmt: skip


@pytest.mark.slow
@on_ranks(1)
def test_a_block_that_differs_is_traced_by_itself():
    for seed, mutate in enumerate(MUTATIONS):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model, which = Model(), random.Random(seed).randrange(1, 4)
        mutate(model, model.blocks[which])
        eager = step(model, model, batch())
        with watch_programs() as seen:
            assert not compare_values(mutate.__name__, eager, step(compiled(model), model, batch()))
        # A parameter of another block makes no difference in the graph but for the input.
        assert seen[0].copies == 3 if mutate is tied_to_another else seen[0].copies <= 2, mutate


@on_ranks(1)
def test_a_copied_block_is_guarded_as_a_traced_one():
    counters.reset()
    model = Model()
    run = compiled(model)
    run(batch())
    for graphs, change in enumerate((other_number, other_epsilon, without_bias, frozen, other_size), 2):
        change(model, model.blocks[2])
        different = compare_values(change.__name__, step(model, model, batch()), step(run, model, batch()))
        assert not different, (change, different)
        assert counters.graphs() == graphs, (change, counters.graphs())


class Counting(Block):
    """Reads a number of the model that changes between blocks."""

    def forward(self, x):
        return super().forward(x) * self.count[0]


class Changing(Model):
    def __init__(self):
        super().__init__(block=Counting)
        self.seen = []
        count = [1]
        for block in self.blocks:
            block.count = count

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            block.count[0] += 1
        return self.head(x)


class Keeping(Model):
    """A block adds to a list that it is given."""

    class Block(Block):
        def forward(self, x, kept):
            kept.append(x)
            return super().forward(x)

    def __init__(self):
        super().__init__(block=Keeping.Block)

    def forward(self, x):
        kept, x = [], self.stem(x)
        for block in self.blocks:
            x = block(x, kept)
        return self.head(sum(kept))


class Collecting(Model):
    """Arguments by name, in containers; results in containers."""

    class Block(Block):
        def forward(self, pair, *, options):
            x, total = pair
            y = super().forward(x, bias=options["bias"])
            return y, {"total": total + y.sum(), "factor": options["factor"]}

    def __init__(self):
        super().__init__(block=Collecting.Block)

    def forward(self, x):
        x = self.stem(x)
        total, bias = x.sum(), torch.ones(DIM)
        for block in self.blocks:
            x, result = block((x, total), options={"bias": bias, "factor": 2})
            total = result["total"] * result["factor"]
        return self.head(x) + total


class LookingUp(Model):
    """A number of each block is in a dict of modules."""

    class Block(Block):
        def forward(self, x):
            return super().forward(x) * FACTORS[self]

    def __init__(self):
        super().__init__(block=LookingUp.Block)
        FACTORS.clear()
        FACTORS.update({block: i + 1 for i, block in enumerate(self.blocks)})


FACTORS = {}


class Drawing(Model):
    """Blocks draw from one generator of the program."""

    class Block(Block):
        def forward(self, x, generator):
            return super().forward(x) * torch.rand(DIM, generator=generator)

    def __init__(self):
        super().__init__(block=Drawing.Block)

    def forward(self, x):
        x, generator = self.stem(x), torch.Generator().manual_seed(1)
        for block in self.blocks:
            x = block(x, generator)
        return self.head(x)


class Passing(Model):
    """Blocks return their argument."""

    class Block(Block):
        def forward(self, x):
            return x, super().forward(x)

    def __init__(self):
        super().__init__(block=Passing.Block)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            before, x = block(x)
            x = x + before
        return self.head(x)


class Shared(Model):
    """Each block is called twice."""

    def forward(self, x):
        x = self.stem(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


WRITING = [(Changing, 0), (Keeping, 0), (Collecting, 3), (LookingUp, 0), (Drawing, 0), (Passing, 0), (Shared, 7)]


@pytest.mark.parametrize(("cls", "copies"), WRITING)
def test_what_the_program_writes_between_calls(cls, copies):
    run_program(cls, copies)


@on_ranks(1)
def run_program(cls, copies):
    torch._dynamo.reset()
    results = []
    with watch_programs() as seen:
        for run_of in (lambda model: model, compiled):
            torch.manual_seed(0)
            model = cls()
            results.append(step(run_of(model), model, batch()))
    assert not compare_values(cls.__name__, *results)
    assert seen[0].copies == copies


@on_ranks(1)
def test_the_report_says_what_is_copied_and_what_differs():
    model = Model()
    other_number(model, model.blocks[2])
    with dtensor_compile.record() as recording:
        compiled(model)(batch())
    reasons = [decision.reason for decision in recording.decisions if decision.kind == "blocks"]
    assert reasons == [
        "2 of 4 calls of equal modules are not traced, but copied from the trace of another",
        "blocks.2 is traced by itself: L['self']._modules['blocks']._modules['2'].scale differs",
    ]


def loss_and_backward(model, x):
    loss = model(x).square().sum()
    loss.backward()
    return loss


def penalty(model, x):
    loss = model(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def of_function(model, x):
    return torch.func.grad(lambda x: model(x).square().sum())(x).sum()


@pytest.mark.parametrize("blocks", mostly_slow(["each", "traced", "once"], "once"))
@pytest.mark.parametrize("program", [loss_and_backward, penalty, of_function])
def test_a_program_that_differentiates_inside_of_the_region(program, blocks):
    differentiate(program, blocks)


@on_ranks(1)
def differentiate(program, blocks):
    torch._dynamo.reset()
    results = []
    for run_of in (lambda program: program, lambda program: compiled(program, blocks)):
        torch.manual_seed(0)
        model = Model()
        result = run_of(program)(model, batch().requires_grad_(program is penalty))
        if program is penalty:
            result.backward()
        results.append((result, [parameter.grad for parameter in model.parameters()]))
    assert not compare_values(program.__name__, *results)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["traced", "once"])
def test_batches_of_several_sizes(blocks):
    several_sizes(blocks)


@on_ranks(2)
def several_sizes(blocks):
    """The second size makes the graph symbolic; the third needs no other one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = sharded(Model(), make_mesh((2,), ("dp",)))
    run = compiled(model, blocks)
    with watch_programs() as seen:
        for rows in (4, 6, 10):
            x = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(rows))
            assert not compare_values("step", step(model, model, x), step(run, model, x))
    assert [this.copies for this in seen] == [3, 3]
