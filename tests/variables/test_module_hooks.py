"""Backward hooks of modules and tensors over DTensors: one graph, eager's gradients, whatever gradients come."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks


def halve(module, grad_in, grad_out):
    return tuple(g * 0.5 if g is not None else None for g in grad_in)


def use_parameter(module, grad_in, grad_out):
    return (grad_in[0] + (grad_out[0] @ module.weight) * 0.1,)


def look(module, grad_in, grad_out):
    return None


def replicate_and_shard(module, grad_in, grad_out):
    return (grad_in[0].redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)]),)


def by_placement(module, grad_in, grad_out):
    factor = 2.0 if grad_out[0].placements[0].is_shard() else 3.0
    return (grad_in[0] * factor * grad_out[0].to_local().shape[0],)


def double(module, grad_out):
    return (grad_out[0] * 2,)


def input_(placement=Shard(0)):
    torch.manual_seed(1)
    return distribute_tensor(torch.randn(4, 4), make_mesh((2,), ("tp",)), [placement]).detach().requires_grad_()


def linear(*hooks, before=()):
    torch.manual_seed(0)
    module = distribute_module(nn.Linear(4, 4), make_mesh((2,), ("tp",)))
    for hook in hooks:
        module.register_full_backward_hook(hook)
    for hook in before:
        module.register_full_backward_pre_hook(hook)
    return module


def square(out):
    return out.full_tensor().square().sum()


def check(model, *inputs, graphs=1, **kwargs):
    counters.reset()
    assert_parity(model, inputs or [input_()], loss=square, backend="dtensor_aten", **kwargs)
    assert counters.graphs() == graphs


HOOKS = {
    "scales": ((halve,), ()),
    "reads a parameter": ((use_parameter,), ()),
    "returns None": ((look,), ()),
    "redistributes": ((replicate_and_shard,), ()),
    "several": ((halve, use_parameter, look), ()),
    "before and after": ((halve,), (double, double)),
    "before": ((), (double,)),
}


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_hooks_of_a_module(name):
    hooks, before = HOOKS[name]
    check(linear(*hooks, before=before), calls=2)


@on_ranks(2)
def test_hooks_of_modules_in_modules():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = distribute_module(layers, make_mesh((2,), ("tp",)))
    for module in (*layers, layers):
        module.register_full_backward_hook(halve)
    check(model)
    with torch._dynamo.config.patch(compiled_autograd=True):
        check(model)


@on_ranks(2)
def test_a_module_without_gradients_for_its_inputs():
    check(linear(look), input_().detach())


@on_ranks(2)
def test_a_plain_module():
    module = nn.Linear(4, 4)
    module.register_full_backward_hook(halve)
    x = torch.randn(3, 4, requires_grad=True)
    assert_parity(module, [x], loss=lambda out: out.square().sum(), backend="dtensor_aten")


class Doubles(nn.Module):
    def forward(self, x):
        return x * 2


class SumsItsResult(nn.Module):
    """The gradient of a sum is replicated, where the result that it belongs to is sharded."""

    def __init__(self, hook):
        super().__init__()
        self.inner = Doubles()
        self.inner.register_full_backward_hook(hook)

    def forward(self, x):
        return self.inner(x).sum()


@on_ranks(2)
def test_a_hook_that_asks_for_placements_sees_those_that_come():
    check(SumsItsResult(by_placement))
    check(linear(by_placement))


class Several(nn.Module):
    def forward(self, x, k, y):
        return x * 2, y + k, "text", x * y


def count_missing(module, grad_in, grad_out):
    missing = sum(1 for g in grad_out if g is None)
    return tuple(None if g is None else g * (1.0 + missing) for g in grad_in)


class UsesSomeResults(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Several()
        self.inner.register_full_backward_hook(count_missing)

    def forward(self, x, y):
        a, _, _, c = self.inner(x, 3, y)
        return a + c


@on_ranks(2)
def test_results_that_get_no_gradient_are_none_in_the_hook():
    check(UsesSomeResults(), input_(), input_(Replicate()))


@on_ranks(2)
def test_a_hook_of_a_tensor_sees_the_placement_that_comes():
    def program(x):
        y = x.sum(0)
        y.register_hook(lambda g: g * 3 if g.placements[0].is_partial() else g * 7)
        return y + 1

    check(program)


@on_ranks(2)
def test_a_hook_of_a_tensor_under_compiled_autograd():
    def program(x):
        y = x * 2
        y.register_hook(lambda g: g * 3)
        return y + 1

    with torch._dynamo.config.patch(compiled_autograd=True):
        check(program)


@on_ranks(2)
def test_a_hook_with_side_effects_breaks_the_graph_and_runs_as_in_eager():
    seen = []
    module = linear(lambda module, grad_in, grad_out: seen.append(grad_out[0].shape))
    run = torch.compile(module, backend="dtensor_aten")
    for calls in (1, 2):
        square(run(input_())).backward()
        assert len(seen) == calls
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="hook-not-traced"):
        torch.compile(module, backend="dtensor_aten", fullgraph=True)(input_())


@on_ranks(2)
def test_a_hook_that_returns_too_few_gradients_raises_as_in_eager():
    model = linear(lambda module, grad_in, grad_out: ())
    for run in (model, torch.compile(model, backend="dtensor_aten", fullgraph=True)):
        with pytest.raises(RuntimeError, match="invalid number of grad_input"):
            square(run(input_())).backward()
