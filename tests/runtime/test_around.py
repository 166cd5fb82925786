"""What programs do to a model between compiled calls: it computes what an eager model does to which the same was done."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dtensor_compile.compat import counters

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


def test_inference_mode_between_training_steps(mesh):
    eager, model, compiled = pair(mesh)
    assert_same(eager, model, compiled)
    with torch.inference_mode():
        assert torch.equal(compiled(X), eager(X))
    assert_same(eager, model, compiled)
