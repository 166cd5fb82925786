"""Paths of modules in Dynamo's own words, and in ours."""

import functools
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from dtensor_compile import explain
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.graph.node_costs import module_path


@pytest.mark.parametrize(
    "words, path",
    [
        ("L['self'].blocks.0.attention", "blocks.0.attention"),
        ("L['self']", ""),
        ("L['fn'].2", "2"),
        ("L__self___blocks.0", "blocks.0"),
        ("L['model'].layers.1", "model.layers.1"),
        ("L['model']", "model"),
        ("G['net'].head", "net.head"),
        ("L['self']._modules['blocks']._modules['3'].wq", "blocks.3.wq"),
        ("L['self'].layers[4].wq", "layers.4.wq"),
        ("L['models']['a'].layers[4].wq", "models.a.layers.4.wq"),
    ],
)
def test_module_path(words, path):
    node = types.SimpleNamespace(meta={"nn_module_stack": {"1": ("L['self']", object), "2": (words, object)}})
    assert module_path(node) == path


def test_a_node_of_the_backward_has_the_path_of_its_forward():
    node = types.SimpleNamespace(meta={"fwd_nn_module_stack": {"1": ("L['self'].head", object)}})
    assert module_path(node) == "head"


def test_no_module():
    assert module_path(types.SimpleNamespace(meta={})) == ""


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = torch.nn.Linear(4, 4)

    def forward(self, x):
        return funcol.all_reduce(self.wq(x), "sum", dist.group.WORLD).sin()


class Model(torch.nn.Module):
    def __init__(this, breaks=False):
        super().__init__()
        this.layers = torch.nn.ModuleList([Layer()])
        this.breaks = breaks

    def forward(this, x):
        x = this.layers[0](x)
        if this.breaks:
            torch._dynamo.graph_break()
        return this.layers[0](x)


class Trainer:
    def __init__(self):
        self.model = Model()

    def step(this, x):
        return this.model(x)


class CallsWith:
    """A wrapper that does not show what it calls."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def step(model, x):
    return model(x)


def step_of(x, *, model):
    return model(x)


def passed_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def _choosing(f, g):
    return lambda *args: (f if len(args) > 9 else g)(*args)


CHOOSES = _choosing(lambda m, x: 0, step)
#: Program, whether it takes the model, and what the report calls its layer.
PROGRAMS = {
    "argument": (step, "argument", "model.layers.0"),
    "partial": (functools.partial(step, Model()), "", "model.layers.0"),
    "partial with keywords": (functools.partial(step_of, model=Model()), "", "model.layers.0"),
    "decorated by torch": (torch.enable_grad()(step), "argument", "model.layers.0"),
    "decorated": (passed_on(step), "argument", "model.layers.0"),
    "decorated, with keywords": (passed_on(step_of), "keyword", "model.layers.0"),
    "two functions to choose from": (CHOOSES, "argument", "Model.layers.0"),
    "no signature": (CallsWith(step), "argument", "Model.layers.0"),
    "module": (Model(), "", "layers.0"),
    "module with a break": (Model(breaks=True), "", "layers.0"),
    "method": (Trainer().step, "", "model.layers.0"),
}


@pytest.mark.parametrize("program, takes, path", PROGRAMS.values(), ids=PROGRAMS)
def test_a_module_is_called_as_the_program_calls_it(program, takes, path):
    args, kwargs = [Model()] if takes == "argument" else [], {"model": Model()} if takes == "keyword" else {}
    with simulated_job(2, 0):
        report = explain(program, stock=True)(*args, torch.randn(2, 4), **kwargs)
    for side in (report.ours, report.stock):
        assert {c.module for c in side.collectives} == {path}
        assert {c.phase for c in side.collectives} == {"forward", "backward"}
