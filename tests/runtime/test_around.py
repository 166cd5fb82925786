"""What programs do to a model between compiled calls: it computes what an eager model does to which the same was
done.
"""

import collections
import copy
import dataclasses
import gc

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from dtensor_compile.compat.dynamo import counters

LOCAL = torch.arange(1.0, 9.0).reshape(4, 2)
X = torch.tensor(3.0)


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.weight = nn.Parameter(DTensor.from_local(LOCAL.clone(), mesh, [Shard(0)], run_check=False))
        self.register_buffer("scale", DTensor.from_local(LOCAL / 2, mesh, [Shard(0)], run_check=False))

    def forward(self, x):
        return (self.weight * self.weight * self.scale * x).to_local().sum()


def pair(mesh):
    model = Model(mesh)
    return Model(mesh), model, torch.compile(model, backend="dtensor_aten", fullgraph=True)


def assert_same(eager, model, compiled):
    for one in (eager, model):
        one.zero_grad()
    mine, theirs = compiled(X), eager(X)
    assert torch.equal(mine, theirs)
    mine.backward(), theirs.backward()
    for a, b in zip(model.parameters(), eager.parameters()):
        assert a.grad._spec == b.grad._spec and torch.equal(a.grad._local_tensor, b.grad._local_tensor)


def test_state_dict_there_and_back(mesh):
    eager, model, compiled = pair(mesh)
    assert_same(eager, model, compiled)
    for one in (eager, model):
        one.load_state_dict({name: value * 2 for name, value in one.state_dict().items()})
    assert_same(eager, model, compiled)
    for one in (eager, model):
        one.load_state_dict({name: value.detach() * 2 for name, value in one.state_dict().items()}, assign=True)
    assert_same(eager, model, compiled)
    assert counters.graphs() == 1


def test_checkpoint(mesh, tmp_path):
    eager, model, compiled = pair(mesh)
    assert_same(eager, model, compiled)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    with torch.no_grad():
        model.weight.mul_(5)
    assert not torch.equal(compiled(X), eager(X))
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    model.load_state_dict(state)
    assert_same(eager, model, compiled)


def test_deepcopy(mesh):
    eager, model, compiled = pair(mesh)
    assert_same(eager, model, compiled)
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        model.weight.mul_(5)
    assert torch.equal(other(X), eager(X)) and not torch.equal(compiled(X), eager(X))
    other(X).backward()
    assert torch.equal(other.weight.grad._local_tensor, 2 * eager.weight.grad._local_tensor)  # its own, copied with it


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_of_the_module(mesh, dtype):
    eager, model, compiled = pair(mesh)
    assert_same(eager, model, compiled)
    eager.to(dtype), model.to(dtype)
    assert_same(eager, model, compiled)


def test_apply(mesh):
    eager, model, compiled = pair(mesh)
    assert_same(eager, model, compiled)
    for one in (eager, model):
        with torch.no_grad():
            one.apply(lambda module: [parameter.fill_(0.5) for parameter in module.parameters()])
    assert_same(eager, model, compiled)
    assert counters.graphs() == 1


@pytest.mark.parametrize("make", [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
], ids=["sgd", "adamw", "adam-foreach"])  # fmt: skip
def test_eager_optimizer(mesh, make):
    eager, model, compiled = pair(mesh)
    for _ in range(3):
        assert_same(eager, model, compiled)
    optimizers = make(eager.parameters()), make(model.parameters())
    for _ in range(3):
        assert_same(eager, model, compiled)
        for optimizer in optimizers:
            optimizer.step()
    assert counters.graphs() == 1


def test_gradients_are_clipped_and_scaled(mesh):
    eager, model, compiled = pair(mesh)
    for one, call in ((eager, eager), (model, compiled)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        scaler.scale(call(X)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(one.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
    assert_same(eager, model, compiled)


def test_parameters_whose_memory_moves(mesh):
    """As with an optimizer that keeps all parameters in one buffer."""
    eager, model, compiled = pair(mesh)
    assert_same(eager, model, compiled)
    for one in (eager, model):
        buffer = torch.ones(16)
        one.weight._local_tensor = buffer[4:12].view(4, 2)
    assert_same(eager, model, compiled)


class ReplacesData(torch.optim.Optimizer):
    """Makes a new tensor for each parameter, and puts its data in the place of the old one's."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


def test_optimizer_that_replaces_data(mesh):
    eager, model, compiled = pair(mesh)
    optimizers = ReplacesData(eager.parameters()), ReplacesData(model.parameters())
    for _ in range(3):
        assert_same(eager, model, compiled)
        for optimizer in optimizers:
            optimizer.step()
    assert counters.graphs() == 1


def test_parameter_that_two_modules_share(mesh):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Model(mesh), Model(mesh)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.first(x) + 3 * self.second(x * 2)

    eager, model = Two(), Two()
    compiled = torch.compile(model, backend="dtensor_aten", fullgraph=True)
    assert_same(eager, model, compiled)
    for one in (eager, model):
        one.second.weight = nn.Parameter(one.first.weight.detach() * 5)
    assert_same(eager, model, compiled)
    for one in (eager, model):
        one.second.weight = one.first.weight
    assert_same(eager, model, compiled)


def test_parameters_are_frozen_in_turns(mesh):
    eager, model, compiled = pair(mesh)
    for train in (True, False, True, False):
        results = []
        for one, call in ((eager, eager), (model, compiled)):
            one.zero_grad()
            one.weight.requires_grad_(train)
            results.append(call(X))
            assert results[-1].requires_grad == train
        assert torch.equal(*results)
    for one in (eager, model):
        one.requires_grad_(True)
    assert_same(eager, model, compiled)
    assert counters.graphs() == 2


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_parameter_in_the_place_of_another(mesh, placement):
    """As ``module.to`` does where it is told to swap."""
    eager, model, compiled = pair(mesh)
    assert_same(eager, model, compiled)
    local = LOCAL if placement == Shard(0) else torch.cat([LOCAL, LOCAL])
    for one in (eager, model):
        other = nn.Parameter(DTensor.from_local(local * 7, mesh, [placement], run_check=False))
        torch.utils.swap_tensors(one.weight, other)
    assert_same(eager, model, compiled)


def test_parameters_from_outside(mesh):
    eager, model, compiled = pair(mesh)
    assert_same(eager, model, compiled)
    mine, theirs = (nn.Parameter(model.weight.detach() * 2) for _ in range(2))
    for call, name, weight in ((compiled, "_orig_mod.weight", mine), (eager, "weight", theirs)):
        torch.func.functional_call(call, {name: weight}, (X,)).backward()
    assert torch.equal(mine.grad._local_tensor, theirs.grad._local_tensor) and mine.grad._spec == theirs.grad._spec


def test_model_that_is_compiled_twice(mesh):
    eager, model, compiled = pair(mesh)
    others = [torch.compile(model, backend="dtensor_aten"), torch.compile(model, backend="aot_eager")]
    for call in (compiled, *others, compiled):
        assert_same(eager, model, call)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    more: dict


def test_inputs_in_containers(mesh):
    Pair = collections.namedtuple("Pair", "first second")

    def program(tree, batch, two, values):
        y = tree["a"]["b"] * batch.x + batch.more["c"][0]
        return {"y": y, "z": two.first + values[0][1]}, Batch(batch.x * 2, {"n": two.second})

    def arguments(placement, scale, other=None):
        make = lambda by, as_placed=placement: DTensor.from_local(LOCAL * by, mesh, [as_placed], run_check=False)  # noqa: E731
        leaf = make(scale) if other is None else DTensor.from_local(torch.ones(8, 2), mesh, [other], run_check=False)
        return {"a": {"b": leaf}}, Batch(make(1), {"c": [make(2)]}), Pair(make(3), 4), [(1, make(5))]

    compiled = torch.compile(program, backend="dtensor_aten")
    for case in [(Shard(0), 1), (Shard(0), 2), (Replicate(), 1), (Shard(1), 1), (Shard(0), 1, Replicate())]:
        (mine, batch), (theirs, expected) = compiled(*arguments(*case)), program(*arguments(*case))
        for key in theirs:
            assert mine[key]._spec == theirs[key]._spec and torch.equal(
                mine[key]._local_tensor, theirs[key]._local_tensor
            )
        assert torch.equal(batch.x._local_tensor, expected.x._local_tensor) and batch.more == expected.more


def test_other_subclasses_beside_it(mesh):
    program = lambda x, other, plain: (x * 2 + 1, other * 3, plain.sum())  # noqa: E731
    compiled = torch.compile(program, backend="dtensor_aten", fullgraph=True)
    x = DTensor.from_local(LOCAL, mesh, [Shard(0)], run_check=False)
    arguments = x, TwoTensor(torch.ones(3), torch.zeros(3)), torch.ones(2)
    for _ in range(2):
        (x, other, plain), (a, b, c) = compiled(*arguments), program(*arguments)
        assert torch.equal(x._local_tensor, a._local_tensor) and x._spec == a._spec and torch.equal(plain, c)
        assert type(other) is TwoTensor and torch.equal(other.a, b.a) and torch.equal(other.b, b.b)


def test_more_kinds_of_input_than_graphs_are_kept(mesh):
    program = lambda x: x * 2 + x.shape[0]  # noqa: E731
    compiled = torch.compile(program, backend="dtensor_aten", dynamic=False)
    for rows in range(1, 2 * torch._dynamo.config.recompile_limit):
        x = DTensor.from_local(torch.ones(rows, 2), mesh, [Shard(0)], run_check=False)
        assert torch.equal(compiled(x)._local_tensor, program(x)._local_tensor)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["plain result", "DTensor"])
def test_calls_leave_nothing_behind(mesh, whole):
    class Product(Model):
        def forward(self, x):
            return self.weight * self.weight * self.scale * x if whole else super().forward(x)

    model = Product(mesh)
    compiled = torch.compile(model, backend="dtensor_aten", fullgraph=True)
    incoming = DTensor.from_local(LOCAL, mesh, [Shard(0)], run_check=False) if whole else torch.tensor(1.0)

    def objects():
        while gc.collect():  # what finalizers of other tests' objects let go
            pass
        found = gc.get_objects()
        return [
            sum(type(value) is kind for value in found) for kind in (DTensor, torch.Tensor, type(model.weight._spec))
        ]

    def run(times):
        for i in range(times):
            compiled(X).backward(incoming)
            if i % 3 == 0:
                model.zero_grad()
            if i % 7 == 0:
                model.weight = nn.Parameter(model.weight.detach().clone())

    run(22)
    before = objects()
    run(220)
    assert objects() == before


def test_inference_mode_between_training_steps(mesh):
    eager, model, compiled = pair(mesh)
    assert_same(eager, model, compiled)
    with torch.inference_mode():
        assert torch.equal(compiled(X), eager(X))
    assert_same(eager, model, compiled)
