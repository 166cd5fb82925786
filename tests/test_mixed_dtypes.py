"""Parameters in one dtype, computation and reductions in another: bfloat16, float8, autocast; meta initialisation."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile import record
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks
from tests.cases import mostly_slow

KERNELS = ("aten", "inductor")


def square(out):
    return out.float().square().sum()


class GatherAndSum(torch.autograd.Function):
    """A parameter stored in shards in bfloat16 and used whole, whose gradient is summed over ranks in float32."""

    @staticmethod
    def forward(ctx, local, mesh):
        ctx.mesh = mesh
        return DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()

    @staticmethod
    def backward(ctx, gradient):
        terms = DTensor.from_local(gradient.float(), ctx.mesh, [Partial()])
        return terms.redistribute(placements=[Shard(0)]).to_local().bfloat16(), None


@pytest.mark.parametrize("rows", mostly_slow([8, 7], 7))
@pytest.mark.parametrize("kernels", KERNELS)
@on_ranks(2)
def test_bfloat16_parameters_whose_gradients_are_summed_in_float32(rows, kernels):
    mesh = make_mesh((2,), ("dp",))
    w = distribute_tensor(torch.randn(rows, 6).bfloat16(), mesh, [Shard(0)]).requires_grad_()

    def step(w, x):
        return (
            x.bfloat16()
            @ w.float().redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).bfloat16()
        )

    x = torch.randn(4, rows) * (mesh.get_local_rank() + 1)
    assert_parity(step, [w, x], loss=square, options={"kernels": kernels})


@on_ranks(2)
def test_a_custom_function_reduces_in_float32():
    mesh = make_mesh((2,), ("dp",))
    local = torch.randn(4, 6).bfloat16().requires_grad_()
    x = torch.randn(4, 8).bfloat16() * (mesh.get_local_rank() + 1)
    assert_parity(lambda local, x: x @ GatherAndSum.apply(local, mesh), [local, x], loss=square)


def stored_in_float8(mesh):
    """Bytes of the shards of a weight in float8, and the scale of all."""
    w = torch.randn(8, 16)
    scale = w.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return distribute_tensor(
        (w / scale).to(torch.float8_e4m3fn).view(torch.uint8), mesh, [Shard(0)], src_data_rank=None
    ), scale


@pytest.mark.parametrize("kernels", KERNELS)
@on_ranks(2)
def test_float8_parameters_are_gathered_as_bytes(kernels):
    def step(w, scale, x):
        whole = w.redistribute(placements=[Replicate()]).to_local().view(torch.float8_e4m3fn)
        return x @ (whole.to(torch.bfloat16) * scale.bfloat16())

    torch.manual_seed(0)
    stored, scale = stored_in_float8(make_mesh((2,), ("tp",)))
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    assert_parity(step, [stored, scale, x], loss=square, options={"kernels": kernels})
    with record() as recording:
        torch.compile(step, backend="dtensor_aten", fullgraph=True)(stored, scale, x)
    assert [c.bytes for c in recording.collectives] == [8 * 16 // 2]  # a byte for each number that the other rank has


@on_ranks(2)
def test_what_gloo_does_not_send_is_an_error_as_in_eager():
    mesh = make_mesh((2,), ("tp",))
    w = DTensor.from_local(torch.ones(4, 16).to(torch.float8_e4m3fn), mesh, [Shard(0)])

    def step(w):
        return w.redistribute(placements=[Replicate()]).to_local().float()

    for run in (step, torch.compile(step, backend="dtensor", fullgraph=True)):
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            run(w)


@on_ranks(2)
def test_autocast_is_entered_around_the_compiled_call():
    mesh = make_mesh((2,), ("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(4, 8)

    def run(call):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(x)
        square(out).backward()
        return out.detach(), [p.grad.full_tensor() for p in model.parameters()]

    expected, gradients = run(model)
    compiled = torch.compile(model, backend="dtensor", fullgraph=True)
    for _ in range(2):
        out, ours = run(compiled)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected)
        for mine, theirs in zip(ours, gradients):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    outside = compiled(x)  # compiled again: the guard sees that autocast is off
    assert outside.dtype == torch.float32
    torch.testing.assert_close(outside, model(x))


@on_ranks(2)
def test_parameters_are_materialised_after_meta_initialisation():
    mesh = make_mesh((2,), ("tp",))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert all(p.is_meta and isinstance(p, DTensor) for p in (model[0].weight, model[2].weight))
    compiled = torch.compile(model, backend="dtensor", fullgraph=True)  # before there are values
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(distribute_tensor(torch.randn(p.shape), mesh, p.placements, src_data_rank=None))
    x = torch.randn(4, 8)
    torch.testing.assert_close(compiled(x), model(x))
    assert_parity(model, [x], loss=square)
