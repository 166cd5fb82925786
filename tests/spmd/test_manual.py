"""Manual regions and the backward barrier: numbers and gradients of the global program, errors that name what is
wrong.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
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
            torch.testing.assert_close(
                got, expected, rtol=1e-5, atol=1e-4, msg=lambda text: f"{name}, compiled={compiled}: {text}"
            )


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
        return (
            funcol.all_reduce(a @ b, "sum", group) if not torch.is_grad_enabled() else _differentiable_sum(a @ b, group)
        )

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
        return y @ w

    check(program, lambda x, w: ((x * 2 + 1) * 3) @ w)


def _beside_marks():
    def program(x, w):
        h = x @ w
        mark_sharding(h, mesh, ("dp", "tp"))
        a = enable_manual_sharding(torch.relu(h), ("dp", "tp"))
        return disable_manual_sharding(a * a, ("dp", "tp"), (4, 8)) + x

    mesh = set_global_mesh_22()
    check(program, lambda x, w: torch.relu(x @ w) ** 2 + x, eager=False)


# ---- some axes, regions in regions ---------------------------------------------------------------------------------


def _sums_along_the_other_axis():
    """A matmul over a dim that the compiler's axis shards is partial along it, inside of the region."""

    def program(x, w):
        a, b = (
            enable_manual_sharding(x, ("dp", "tp"), axes=("dp",)),
            enable_manual_sharding(w, (None, None), axes=("dp",)),
        )
        return disable_manual_sharding(torch.relu(a @ b), ("dp", None), (4, 8), axes=("dp",)) * 2

    check(program, lambda x, w: torch.relu(x @ w) * 2)


def _nested_decorators():
    @manual_region(in_specs=((None, "tp"),), out_specs=(None, "tp"), axes=("tp",))
    def inner(a):
        return torch.sin(a) * 2

    @manual_region(in_specs=(("dp", None), (None, None)), out_specs=("dp", None), axes=("dp",))
    def outer(a, w):
        return inner(a @ w) + 1

    check(outer, lambda x, w: torch.sin(x @ w) * 2 + 1)


def _closed_over_in_nested_regions():
    def program(x, w):
        a = enable_manual_sharding(x, ("dp", None), axes=("dp",))
        b = enable_manual_sharding(a, (None, "tp"), axes=("tp",)) * w.sum()
        b = disable_manual_sharding(b, (None, "tp"), (2, 8), axes=("tp",))
        return disable_manual_sharding(b @ w, ("dp", None), (4, 8), axes=("dp",))

    check(program, lambda x, w: x * w.sum() @ w, eager=False)


def _opened_at_once_and_closed_axis_by_axis():
    def program(x, w):
        a = enable_manual_sharding(x, ("dp", "tp"))
        a = disable_manual_sharding(a * 2, (None, "tp"), (2, 8), axes=("tp",))
        return disable_manual_sharding(a, ("dp", None), (4, 8), axes=("dp",)) @ w

    check(program, lambda x, w: (x * 2) @ w)


def _one_dim_cut_by_both_axes_in_any_order():
    def stepwise(x, w):
        a = enable_manual_sharding(x, ("tp", None), axes=("tp",))
        b = enable_manual_sharding(a * 2, ("dp", None), axes=("dp",))
        b = disable_manual_sharding(b * 3, ("dp", None), (2, 8), axes=("dp",))
        return disable_manual_sharding(b, ("tp", None), (4, 8), axes=("tp",)) @ w

    def at_once(x, w):
        return (
            disable_manual_sharding(enable_manual_sharding(x, (("tp", "dp"), None)) * 6, (("tp", "dp"), None), (4, 8))
            @ w
        )

    def in_part(x, w):
        a = enable_manual_sharding(x, (("tp", "dp"), None), axes=("tp",))
        return disable_manual_sharding(a * 6, (("tp", "dp"), None), (4, 8), axes=("tp",)) @ w

    for program in (stepwise, at_once, in_part):
        check(program, lambda x, w: (x * 6) @ w)


def _uneven_along_the_other_axis():
    def program(x, w):
        a, b = (
            enable_manual_sharding(x, ("dp", "tp"), axes=("dp",)),
            enable_manual_sharding(w[:, :5], (None, "tp"), axes=("dp",)),
        )
        return disable_manual_sharding(torch.sin(a @ b), ("dp", "tp"), (4, 5), axes=("dp",))

    check(program, lambda x, w: torch.sin(x @ w[:, :5]))


def _marks_in_a_region():
    def program(x, w):
        a = enable_manual_sharding(x, ("dp", None), axes=("dp",))
        h = torch.relu(a @ w)
        mark_sharding(h, mesh, (None, "tp"))
        return disable_manual_sharding(h * 2, ("dp", None), (4, 8), axes=("dp",))

    def wrong(x, w):
        a = enable_manual_sharding(x, ("dp", None))
        mark_sharding(a, mesh, (None, "tp"))
        return disable_manual_sharding(a, ("dp", None), (4, 8))

    mesh = set_global_mesh_22()
    check(program, lambda x, w: torch.relu(x @ w) * 2, eager=False)
    with pytest.raises(Exception, match="names an axis along which its tensor is manual already .*test_manual.py"):
        torch.compile(wrong, backend="dtensor_aten")(torch.ones(4, 8), torch.ones(8, 8))


def _falling_back_and_random_numbers():
    """What falls back to whole tensors, or draws, in a region that the compiler shards along the other axis."""

    def program(x):
        a = enable_manual_sharding(x, ("dp", "tp"), axes=("dp",))
        a = F.dropout(a, 0.5) + torch.linalg.matrix_exp(a[:, :2] * 0.1).sum() + torch.bernoulli(torch.full_like(a, 0.5))
        return disable_manual_sharding(a, ("dp", "tp"), (4, 8), axes=("dp",))

    torch._dynamo.reset()
    half = torch.arange(16.0).reshape(2, 8) / 16
    torch.manual_seed(0)
    got = torch.compile(program, backend="dtensor_aten", fullgraph=True)(torch.cat([half, half]))
    torch.manual_seed(0)
    want = (
        F.dropout(half, 0.5)
        + torch.linalg.matrix_exp(half[:, :2] * 0.1).sum()
        + torch.bernoulli(torch.full_like(half, 0.5))
    )
    torch.testing.assert_close(got, torch.cat([want, want]))


def _the_users_mark_goes_first():
    """A region that takes a marked tensor in cuts it otherwise for itself alone."""

    def program(x, w):
        a = enable_manual_sharding(x, (None, "tp"))
        return disable_manual_sharding(torch.sin(a), (None, "tp"), (4, 8)) @ w + x

    x, w = torch.randn(4, 8), torch.randn(8, 8)
    mark_sharding(x, set_global_mesh_22(), ("dp", None))
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(program, backend="dtensor_aten", fullgraph=True)(x, w), torch.sin(x) @ w + x
    )


def _sizes_that_vary():
    def program(x):
        a = enable_manual_sharding(x, ("dp", None), axes=("dp",))
        return disable_manual_sharding(torch.relu(a), ("dp", None), x.shape, axes=("dp",))

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="dtensor_aten", fullgraph=True, dynamic=True)
    for n in (4, 6, 10):
        x = torch.arange(n * 3.0).reshape(n, 3) - 7
        torch.testing.assert_close(compiled(x), torch.relu(x))


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_regions_along_some_axes():
    set_global_mesh_22()
    try:
        for case in (
            _sums_along_the_other_axis, _nested_decorators, _closed_over_in_nested_regions,
            _opened_at_once_and_closed_axis_by_axis,
            _one_dim_cut_by_both_axes_in_any_order, _uneven_along_the_other_axis, _marks_in_a_region,
            _falling_back_and_random_numbers,
            _the_users_mark_goes_first, _sizes_that_vary, _errors_of_nesting,
        ):  # fmt: skip
            case()
    finally:
        set_global_mesh(None)


def _errors_of_nesting():
    x = torch.randn(4, 8)

    def twice(x):
        a = enable_manual_sharding(x, ("dp", None), axes=("dp",))
        return enable_manual_sharding(a, (None, None), axes=("dp",))

    with pytest.raises(ManualRegionError, match="mesh axis 'dp' is manual already"):
        twice(x)
    with pytest.raises(Exception, match="mesh axis 'dp' is manual already"):
        torch.compile(twice, backend="dtensor_aten")(x)
    with pytest.raises(Exception, match="entered twice along an axis .*test_manual.py"):
        torch.compile(
            lambda x: enable_manual_sharding(enable_manual_sharding(x, ("dp", None)), ("dp", None)),
            backend="dtensor_aten",
        )(x)
    a = enable_manual_sharding(x, ("dp", "tp"), axes=("dp",))
    for spec, shape, axes in ((("dp", None), (4, 8), None), ((None, "tp"), (2, 16), ("tp",))):
        with pytest.raises(ManualRegionError, match="mesh axis 'tp' is not manual here"):
            disable_manual_sharding(a, spec, shape, axes=axes)
    with pytest.raises(ManualRegionError, match="mesh axis 'dp' is manual already: inside"):
        enable_manual_sharding(a, ("dp", None), axes=("tp",))

    buffer = torch.zeros(2, 8)

    def writes(x):
        buffer.copy_(enable_manual_sharding(x, ("dp", None)))
        return x * 2

    with pytest.raises(
        Exception, match="buffer.* is a tensor from outside, and a manual region writes to it .*test_manual.py"
    ):
        torch.compile(writes, backend="dtensor_aten")(x)
    leaving = {
        "in a dict": lambda x: {"a": [enable_manual_sharding(x, ("dp", None)) * 2]},
        "of some axes": lambda x: enable_manual_sharding(x, ("dp", None), axes=("dp",)) * 2,
        "half closed": lambda x: disable_manual_sharding(
            enable_manual_sharding(x, ("dp", "tp")), (None, "tp"), (2, 8), axes=("tp",)
        ),
        "one number": lambda x: enable_manual_sharding(x, ("dp", None)).sum(),
        "before a graph break": lambda x: print(enable_manual_sharding(x, ("dp", None)).sum().item()),
    }
    for how, program in leaving.items():
        with pytest.raises(Exception, match=r"leave a manual region unclosed: \w+ of shape \[.*test_manual.py"):
            torch.compile(program, backend="dtensor_aten")(x), how


def _errors():
    x, w = torch.randn(4, 8), torch.randn(8, 8)

    def unclosed(x, w):
        return enable_manual_sharding(x, ("dp", None)) * 2

    with pytest.raises(Exception, match=r"leave a manual region unclosed: mul of shape \[2, 8\] .*\* 2"):
        torch.compile(unclosed, backend="dtensor_aten")(x, w)

    def meet(x, w):
        a = enable_manual_sharding(x, ("dp", None), axes=("dp",))
        b = enable_manual_sharding(x, ("dp", None))
        return disable_manual_sharding(a + b, ("dp", None), (4, 8), axes=("dp",))

    with pytest.raises(Exception, match="mixes tensors of several manual regions"):
        torch.compile(meet, backend="dtensor_aten")(x, w)
    with pytest.raises(ManualRegionError, match="cannot be split into 2 equal pieces"):
        enable_manual_sharding(torch.ones(3, 3), ("dp", None))
    with pytest.raises(ManualRegionError, match="after one that is not manual"):
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


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_regions():
    set_global_mesh_22()
    try:
        for case in (
            _all_axes,
            _closed_over_parameters,
            _some_axes_and_nested,
            _a_sum_of_its_own,
            _beside_marks,
            _errors,
        ):
            case()
    finally:
        set_global_mesh(None)


# ---- the barrier ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
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
