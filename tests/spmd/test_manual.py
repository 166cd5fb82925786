"""Manual regions and the backward barrier: numbers and gradients of the global program, errors that name what is wrong."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from dtensor_compile import ManualRegionError
from dtensor_compile.spmd import (
    Mesh,
    apply_backward_optimization_barrier,
    disable_manual_sharding,
    enable_manual_sharding,
    manual_region,
    mark_sharding,
    set_global_mesh,
)
from dtensor_compile.testing import on_ranks


def gradients(program, x, w, compiled):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    torch._dynamo.reset()
    run = torch.compile(program, backend="dtensor_aten", fullgraph=True) if compiled else program
    y = run(x, w)
    y = y.full_tensor() if hasattr(y, "full_tensor") else y
    (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
    return y.detach(), x.grad, w.grad


def check(program, plain, eager=True):
    torch.manual_seed(2)
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    want = gradients(plain, x, w, False)
    for compiled in (False, True) if eager else (True,):
        for name, got, expected in zip("yxw", gradients(program, x, w, compiled), want):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4, msg=lambda text: f"{name}, compiled={compiled}: {text}")


def _all_axes():
    def program(x, w):
        a = enable_manual_sharding(x, ("dp", None))
        b = enable_manual_sharding(w, (None, "tp"))
        return disable_manual_sharding(torch.relu(a @ b), ("dp", "tp"), (4, 8)) * 2

    check(program, lambda x, w: torch.relu(x @ w) * 2)


def _a_sum_of_its_own():
    group = set_global_mesh_22().to_device_mesh()["tp"].get_group()

    @manual_region(in_specs=(("dp", "tp"), ("tp", None)), out_specs=("dp", None))
    def product(a, b):
        return funcol.all_reduce(a @ b, "sum", group) if not torch.is_grad_enabled() else _differentiable_sum(a @ b, group)

    check(product, lambda x, w: x @ w)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx, gradient):
        return funcol.wait_tensor(funcol.all_reduce(gradient, "sum", ctx.group)), None


def _differentiable_sum(x, group):
    return _Sum.apply(x, group)


def _closed_over_parameters():
    scale = torch.full((8,), 3.0)

    def program(x, w):
        a = enable_manual_sharding(x, (("dp", "tp"), None))
        return disable_manual_sharding((a @ w) * scale, (("dp", "tp"), None), (4, 8))

    check(program, lambda x, w: (x @ w) * 3, eager=False)


def _some_axes_and_nested():
    def program(x, w):
        a = enable_manual_sharding(x, ("dp", "tp"), axes=("dp",))  # a DTensor over tp
        a = a * 2
        b = enable_manual_sharding(a, (None, "tp"), axes=("tp",))
        b = disable_manual_sharding(b + 1, (None, "tp"), (2, 8), axes=("tp",))
        y = disable_manual_sharding(b * 3, ("dp", "tp"), (4, 8), axes=("dp",))
        return y @ w if not torch.compiler.is_compiling() else y @ w

    check(program, lambda x, w: ((x * 2 + 1) * 3) @ w, eager=False)


def _beside_marks():
    def program(x, w):
        h = x @ w
        mark_sharding(h, mesh, ("dp", "tp"))
        a = enable_manual_sharding(torch.relu(h), ("dp", "tp"))
        return disable_manual_sharding(a * a, ("dp", "tp"), (4, 8)) + x

    mesh = set_global_mesh_22()
    check(program, lambda x, w: torch.relu(x @ w) ** 2 + x, eager=False)


def _errors():
    x, w = torch.randn(4, 8), torch.randn(8, 8)

    def unclosed(x, w):
        return enable_manual_sharding(x, ("dp", None)) * 2

    with pytest.raises(Exception, match=r"leave a manual region unclosed: mul of shape \[2, 8\] .*\* 2"):
        torch.compile(unclosed, backend="dtensor_aten")(x, w)

    def meet(x, w):
        a = enable_manual_sharding(x, ("dp", None), axes=("dp",))
        b = enable_manual_sharding(x, ("dp", None))
        return disable_manual_sharding(a + b, ("dp", None), (4, 8))

    with pytest.raises(Exception, match="several manual regions meet"):
        torch.compile(meet, backend="dtensor_aten")(x, w)
    with pytest.raises(ManualRegionError, match="cannot be cut in 2 equal pieces"):
        enable_manual_sharding(torch.ones(3, 3), ("dp", None))
    with pytest.raises(ManualRegionError, match="behind one that is not manual"):
        enable_manual_sharding(x, (("dp", "tp"), None), axes=("tp",))
    with pytest.raises(ManualRegionError, match="not \\[4, 4\\]"):
        disable_manual_sharding(torch.ones(2, 8), ("dp", None), (4, 4))
    with pytest.raises(ManualRegionError, match="takes 1 arguments"):
        manual_region(in_specs=(("dp", None),), out_specs=("dp", None))(lambda a: a)(x, w)


def set_global_mesh_22():
    mesh = Mesh(range(4), (2, 2), ("dp", "tp"))
    mesh.to_device_mesh("cpu")
    set_global_mesh(mesh)
    return mesh


@on_ranks(4, timeout=280)
def test_regions():
    set_global_mesh_22()
    try:
        for case in (_all_axes, _closed_over_parameters, _some_axes_and_nested, _a_sum_of_its_own, _beside_marks, _errors):
            case()
    finally:
        set_global_mesh(None)


# ---- the barrier ---------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_barrier_keeps_numbers_and_stands_in_the_backward():
    from dtensor_compile.testing import captured_graph

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with_barrier = copy.deepcopy(model)
    assert apply_backward_optimization_barrier(with_barrier[1]) is with_barrier[1]
    x = torch.randn(2, 8)
    text = captured_graph(with_barrier, x, options={"kernels": "aten"}, stage="captured")
    assert text.count("= backward_barrier(") == 2
    assert text.index("backward_barrier(") < text.index("threshold_backward(") < text.rindex("backward_barrier(")
    assert "backward_barrier" not in captured_graph(model, x, options={"kernels": "aten"})
    runs = [model, with_barrier, torch.compile(with_barrier, backend="dtensor_aten", fullgraph=True)]
    runs.append(torch.compile(with_barrier, backend="dtensor", fullgraph=True))
    results = []
    for run in runs:
        run.zero_grad()
        run(x).square().sum().backward()
        results.append([p.grad.clone() for p in run.parameters()])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_barrier_without_gradients():
    model = apply_backward_optimization_barrier(nn.Linear(2, 2))
    with torch.no_grad():
        assert model(torch.ones(1, 2)).requires_grad is False
    assert dist.is_available()
