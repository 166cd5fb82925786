"""Gradients of a compiled call: DTensors with the placements of the parameters, accumulated, seen by hooks, as in
eager.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

LOCAL = torch.arange(1.0, 9.0).reshape(4, 2)


class Model(nn.Module):
    """Elementwise, so that what other ranks hold does not matter."""

    def __init__(self, mesh, placement=Shard(0), local=LOCAL, dtype=torch.float32):
        super().__init__()
        self.a, self.b, self.unused = (
            nn.Parameter(DTensor.from_local((local + i).to(dtype), mesh, [placement], run_check=False))
            for i in range(3)
        )
        self.frozen = nn.Parameter(
            DTensor.from_local(local.to(dtype), mesh, [placement], run_check=False), requires_grad=False
        )

    def forward(self, x):
        return (self.a * self.b * x + self.a + self.frozen).to_local().sum()


class Sum(Model):
    """Both gradients are one tensor, and it is the one that comes in."""

    def forward(self, x):
        return (self.a + self.b).to_local() + x


def pair(mesh, cls=Model, **arguments):
    """An eager model, a model like it and that one compiled."""
    eager, model = cls(mesh, **arguments), cls(mesh, **arguments)
    return eager, model, torch.compile(model, backend="dtensor_aten", fullgraph=True)


def assert_same_gradients(model, eager):
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters()):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert isinstance(mine.grad, DTensor) and mine.grad._spec == theirs.grad._spec
            assert mine.grad.dtype == theirs.grad.dtype and not mine.grad.requires_grad and mine.grad.grad_fn is None
            assert mine.grad._local_tensor.stride() == theirs.grad._local_tensor.stride()
            assert torch.equal(mine.grad._local_tensor, theirs.grad._local_tensor), name


X = torch.tensor(3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_from_nothing_and_accumulated(mesh, placement, dtype):
    eager, model, compiled = pair(mesh, placement=placement, dtype=dtype)
    for set_to_none in (False, False, True, False):
        compiled(X).backward()
        eager(X).backward()
        assert_same_gradients(model, eager)
        if set_to_none:
            model.zero_grad()
            eager.zero_grad()


def test_accumulated_in_place(mesh):
    _, model, compiled = pair(mesh)
    compiled(X).backward()
    gradient, version = model.a.grad, model.a.grad._version
    compiled(X).backward()
    assert model.a.grad is gradient and gradient._version > version


def test_accumulated_into_zeros(mesh):
    eager, model, compiled = pair(mesh)
    for one, call in ((model, compiled), (eager, eager)):
        for parameter in one.parameters():
            parameter.grad = torch.zeros_like(parameter)
        call(X).backward()
    assert_same_gradients(model, eager)


def test_accumulated_into_a_gradient_that_is_placed_otherwise(mesh):
    eager, model, compiled = pair(mesh)
    for one, call in ((model, compiled), (eager, eager)):
        one.a.grad = DTensor.from_local(torch.ones(8, 2), mesh, [Replicate()], run_check=False)
        call(X).backward()
    assert model.a.grad.placements == eager.a.grad.placements
    assert model.a.grad.shape == eager.a.grad.shape


def test_gradients_that_are_one_tensor_do_not_share_memory(mesh):
    _, model, compiled = pair(mesh, Sum)
    out = compiled(X)
    incoming = torch.ones_like(out)
    out.backward(incoming)
    model.a.grad._local_tensor.add_(1)
    assert torch.equal(model.b.grad._local_tensor, torch.ones(4, 2)) and torch.equal(incoming, torch.ones(4, 2))


def test_strides_follow_the_parameter(mesh):
    eager, model, compiled = pair(mesh, local=torch.arange(8.0).reshape(2, 4).t())
    compiled(X).backward()
    eager(X).backward()
    assert_same_gradients(model, eager)


@pytest.mark.parametrize("kind", ["tensor", "accumulated", "several", "node before", "node after"])
def test_hooks_fire(mesh, kind):
    eager, model, compiled = pair(mesh)
    seen = {}

    def watch(one):
        values = seen.setdefault(one, [])
        note = lambda tensors: values.append([t.to_local().clone() for t in tensors if t is not None])  # noqa: E731
        if kind == "tensor":
            one.a.register_hook(lambda gradient: note([gradient]) or gradient * 2)
        elif kind == "accumulated":
            one.a.register_post_accumulate_grad_hook(lambda parameter: note([parameter.grad]))
        elif kind == "several":
            torch.autograd.graph.register_multi_grad_hook([one.a, one.b], note)
        else:
            node = torch.autograd.graph.get_gradient_edge(one.a).node
            one.node = [node]  # a node that nobody holds goes, with its hooks
            if kind == "node before":
                node.register_prehook(lambda incoming: note(incoming))
            else:
                node.register_hook(lambda _, incoming: note(incoming))

    watch(model), watch(eager)
    for _ in range(2):
        compiled(X).backward()
        eager(X).backward()
    assert_same_gradients(model, eager)
    assert len(seen[model]) == len(seen[eager]) == 2
    assert all(torch.equal(a, b) for mine, theirs in zip(seen[model], seen[eager]) for a, b in zip(mine, theirs))


def test_hook_of_the_compiled_node_sees_gradients(mesh):
    _, model, compiled = pair(mesh)
    seen = []
    out = compiled(X)
    out.grad_fn.register_hook(lambda gradients, _: seen.append([g for g in gradients if g is not None]))
    out.backward()
    assert len(seen[0]) == 2 and all(isinstance(gradient, DTensor) for gradient in seen[0])


def test_torch_autograd_grad(mesh):
    eager, model, compiled = pair(mesh)
    mine, theirs = (torch.autograd.grad(call(X), [one.a, one.b]) for one, call in ((model, compiled), (eager, eager)))
    assert all(torch.equal(a._local_tensor, b._local_tensor) and a._spec == b._spec for a, b in zip(mine, theirs))
    assert model.a.grad is None


def test_backward_for_some_inputs(mesh):
    eager, model, compiled = pair(mesh)
    compiled(X).backward(inputs=[model.b])
    eager(X).backward(inputs=[eager.b])
    assert_same_gradients(model, eager)


def test_parameter_that_is_used_outside_too(mesh):
    eager, model, compiled = pair(mesh)
    for one, call in ((model, compiled), (eager, eager)):
        for _ in range(2):
            (call(X) + (one.a * one.b).to_local().sum() + call(X * 2)).backward()
    assert_same_gradients(model, eager)


def test_backward_twice(mesh):
    eager, model, compiled = pair(mesh)
    for call in (compiled, eager):
        loss = call(X)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, eager)


def test_gradient_of_a_gradient_is_refused(mesh):
    _, model, compiled = pair(mesh)
    compiled(X).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        model.a.grad.to_local().sum().backward()


def test_parameter_that_is_frozen_before_the_backward_pass(mesh):
    eager, model, compiled = pair(mesh)
    for one, call in ((model, compiled), (eager, eager)):
        call(X).backward()
        one.zero_grad()
        loss = call(X)
        one.a.requires_grad_(False)
        loss.backward()
        assert one.a.grad is None and one.b.grad is not None
        one.a.requires_grad_(True)
        call(X).backward()
    assert_same_gradients(model, eager)


@pytest.mark.parametrize("later", [False, True])
def test_gradient_of_another_dtype(mesh, later):
    eager, model, compiled = pair(mesh, dtype=torch.bfloat16)
    for one, call in ((model, compiled), (eager, eager)):
        if later:
            call(X).backward()
            one.zero_grad()
        one.a.grad_dtype = torch.float32
        for _ in range(2):
            call(X).backward()
        assert one.a.grad.dtype is torch.float32
    assert_same_gradients(model, eager)


def test_two_parameters_with_one_gradient(mesh):
    eager, model, compiled = pair(mesh)
    for one, call in ((model, compiled), (eager, eager)):
        call(X).backward()
        one.a.grad = one.b.grad
        call(X).backward()
        assert one.a.grad is one.b.grad
    assert_same_gradients(model, eager)


def test_two_graphs_in_one_backward_pass(mesh):
    product, square = (lambda a, b: (a * b).to_local().sum()), (lambda a: (a * a * 2).to_local().sum())
    eager, model = Model(mesh), Model(mesh)
    calls = [torch.compile(function, backend="dtensor_aten", fullgraph=True) for function in (product, square)]
    for one, (first, second) in ((model, calls), (eager, (product, square))):
        for _ in range(2):
            (first(one.a, one.b) + second(one.a) + first(one.b, one.a)).backward()
        torch.autograd.backward([first(one.a, one.b), second(one.b)], [torch.tensor(2.0), torch.tensor(3.0)])
    assert_same_gradients(model, eager)


def test_tensors_that_are_saved_go_through_hooks(mesh):
    eager, model, compiled = pair(mesh)
    for call in (compiled, eager):
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
            loss = call(X)
        loss.backward()
        with torch.autograd.graph.save_on_cpu():
            loss = call(X)
        loss.backward()
        assert packed
    assert_same_gradients(model, eager)


@pytest.mark.parametrize("reentrant", [False, True])
def test_region_that_is_computed_again(mesh, reentrant):
    eager, model, compiled = pair(mesh)
    for call in (compiled, eager):
        for _ in range(2):
            x = X.clone().requires_grad_()
            checkpoint(call, x, use_reentrant=reentrant).backward()
    assert_same_gradients(model, eager)


def test_a_hook_comes_and_goes(mesh):
    eager, model, compiled = pair(mesh)
    seen = {model: [], eager: []}
    for one, call in ((model, compiled), (eager, eager)):
        for register in (one.a.register_hook, one.a.register_post_accumulate_grad_hook):
            note = lambda value, one=one: seen[one].append(1)  # noqa: E731
            handle = register(note)
            call(X).backward()
            handle.remove()
            call(X).backward()
    assert seen[model] == seen[eager] == [1, 1]
    assert_same_gradients(model, eager)


def test_second_backward_pass_without_the_graph_is_an_error(mesh):
    _, _, compiled = pair(mesh)
    loss = compiled(X)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_input_that_is_no_leaf(mesh):
    eager, model, compiled = pair(mesh)
    for call in (compiled, eager):
        x = torch.tensor(2.0, requires_grad=True)
        call(x * 3).backward()
        assert x.grad is not None
    assert_same_gradients(model, eager)


def test_parameter_that_became_another_one(mesh):
    _, model, compiled = pair(mesh)
    model.b = model.a
    compiled(X).backward()
    assert torch.equal(model.a.grad._local_tensor, 2 * LOCAL * X + 1)


def test_inside_of_no_grad_after_training(mesh):
    eager, model, compiled = pair(mesh)
    compiled(X).backward()
    with torch.no_grad():
        assert torch.equal(compiled(X), eager(X)) and not compiled(X).requires_grad
    eager(X).backward()
    assert_same_gradients(model, eager)
