"""Backward hooks in compiled code, on tensors and on modules."""

import torch
from torch._dynamo import compiled_autograd
from torch.distributed.tensor import DTensor, Shard

from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.testing.parity import compare_values


def _step(run, local):
    local = local.clone().requires_grad_()
    d = DTensor.from_local(local, make_mesh((2,), ("tp",)), [Shard(0)])
    out = run(d)
    out.to_local().sum().backward()
    return out, local.grad


@on_ranks(2)
def test_hook_on_an_intermediate_dtensor():
    def program(d):
        y = d * 2
        y.register_hook(lambda grad: grad * 3)
        return y * y

    x = torch.arange(4.0).reshape(2, 2)
    compiled = torch.compile(program, backend="dtensor", fullgraph=True)
    assert not compare_values("step", _step(program, x), _step(compiled, x))


@on_ranks(2)
def test_hook_reads_mesh_and_placements():
    def program(d):
        y = d * 2
        y.register_hook(lambda grad: grad * d.device_mesh.size() if d.placements[0].is_shard() else grad)
        return y * y

    x = torch.arange(4.0).reshape(2, 2)
    compiled = torch.compile(program, backend="dtensor", fullgraph=True)
    assert not compare_values("step", _step(program, x), _step(compiled, x))


@on_ranks(1)
def test_module_backward_hook_with_compiled_autograd():
    def step(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        model.register_full_backward_hook(lambda module, grad_in, grad_out: tuple(g * 5 for g in grad_in))
        x = torch.arange(4.0).reshape(2, 2).requires_grad_()
        run = torch.compile(model, backend="dtensor", fullgraph=True) if compiled else model
        out = run(x)
        out.sum().backward()
        return out, x.grad, model.weight.grad

    expected = step(compiled=False)
    with compiled_autograd._enable(torch.compile(backend="dtensor", fullgraph=True)):
        assert not compare_values("step", expected, step(compiled=True))
