import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile import record
from dtensor_compile.passes.sequence_parallel import sequence_parallel
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import local, marked, move, rewritten, unchanged

ASKED = {"enable_passes": ("sequence_parallel",), "strict": True}


def layers_of_plain_tensors():
    """What lies between an all-reduce and a product, twice over."""

    def function(x, y, w, u):
        s = move(x, "P(sum)", "R").relu() * w
        t = (s.relu() * w).exp().sin() + move(y, "P(sum)", "R")
        return (marked(t.cos(), "R", (4, 6)) @ marked(u, "S(1)", (6, 4)),)

    return rewritten(sequence_parallel, function, local(4, 6) / 100, local(4, 6) / 100, torch.ones(6), torch.ones(6, 2))


class Golden(TestCase):
    maxDiff = None

    def test_sums_are_scattered_and_gathered_before_the_next_product(self):
        before, after, decisions = run_on_ranks(2, layers_of_plain_tensors)[0]
        self.assertExpectedInline(
            before,
            """\
x_1: [4, 6]
y_1: [4, 6]
w_1: [6]
u_1: [6, 2]
redistribute: [4, 6] = redistribute(x_1, P(sum)->R)
relu: [4, 6] = relu(redistribute)
mul: [4, 6] = mul(relu, w_1)
relu_1: [4, 6] = relu(mul)
mul_1: [4, 6] = mul(relu_1, w_1)
exp: [4, 6] = exp(mul_1)
sin: [4, 6] = sin(exp)
redistribute_1: [4, 6] = redistribute(y_1, P(sum)->R)
add: [4, 6] = add(sin, redistribute_1)
cos: [4, 6] = cos(add)
mm: [4, 2] = mm(cos, u_1)
return [mm]
""",
        )
        self.assertExpectedInline(
            after,
            """\
x_1: [4, 6]
y_1: [4, 6]
w_1: [6]
u_1: [6, 2]
redistribute_default: [2, 6] = redistribute(x_1, P(sum)->S(0))
relu_default: [2, 6] = relu(redistribute_default)
mul_tensor: [2, 6] = mul(relu_default, w_1)
relu_default_1: [2, 6] = relu(mul_tensor)
mul_tensor_1: [2, 6] = mul(relu_default_1, w_1)
exp_default: [2, 6] = exp(mul_tensor_1)
sin_default: [2, 6] = sin(exp_default)
redistribute_default_1: [2, 6] = redistribute(y_1, P(sum)->S(0))
add_tensor: [2, 6] = add(sin_default, redistribute_default_1)
cos_default: [2, 6] = cos(add_tensor)
redistribute_default_2: [4, 6] = redistribute(cos_default, S(0)->R)
mm: [4, 2] = mm(redistribute_default_2, u_1)
return [mm]
""",
        )
        assert [d[1:] for d in decisions] == [("P(sum)->R", "P(sum)->S(0)")] * 2


class Block(nn.Module):
    """A residual block with plain tensors around two parallel layers."""

    def __init__(self, dim, norm):
        super().__init__()
        self.norm, self.up, self.down = norm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model(layers=3, dim=16, norm=nn.RMSNorm, bias=True):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(dim, norm) for _ in range(layers)), norm(dim))
    plan = {
        f"{i}.{name}": style()
        for i in range(layers)
        for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }
    return parallelize_module(blocks, make_mesh((dist.get_world_size(),), ("tp",)), plan)


def sent(compiled, x):
    with record() as recording:
        compiled(x).square().sum().backward()
    collectives = sorted(c.kind for c in recording.collectives)
    return recording.bytes_sent, collectives, {d.kind for d in recording.decisions}


@pytest.mark.slow
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@on_ranks(4)
def test_plain_models_have_eagers_numbers_and_the_bytes_of_the_program(norm):
    loss = lambda out: out.exp().mean()  # noqa: E731
    x = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert_parity(model(norm=norm), [x], loss=loss, backend="dtensor_aten", options=ASKED, calls=2)
    torch._dynamo.reset()
    before, kinds, passes = sent(torch.compile(model(norm=norm), backend="dtensor_aten"), x)
    assert "sequence_parallel" not in passes and set(kinds) == {"all_reduce"}
    after, kinds, passes = sent(torch.compile(model(norm=norm), backend="dtensor_aten", options=ASKED), x)
    assert "sequence_parallel" in passes and kinds.count("all_gather") >= 5, kinds
    assert after <= before * 1.01


@pytest.mark.slow
@on_ranks(2)
def test_through_inductor():
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert_parity(model(2), [x], loss=lambda out: out.exp().mean(), options=ASKED, calls=2)


@on_ranks(2)
def test_sizes_that_no_dim_divides_stay():
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert_parity(model(2), [x], loss=lambda out: out.exp().mean(), backend="dtensor_aten", options=ASKED, calls=2)


@on_ranks(2)
def test_shards_that_a_program_took_out_of_dtensors_are_not_taken_for_the_same():
    """What is computed from another part on each rank is not the same, whoever says so of what comes after it."""
    mesh = make_mesh((2,), ("tp",))

    def function(x, w):
        part = (
            DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
        )
        mine = w.to_local()[:4] * 2  # other values on each rank
        return torch.relu((part * mine).exp().sin().cos() + part).sum() + mine.sum()

    w = distribute_tensor(torch.arange(64.0).reshape(8, 8) / 64, mesh, [Shard(0)]).requires_grad_()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
    assert_parity(function, [x, w], loss=lambda out: out, backend="dtensor_aten", options=ASKED, calls=2)


@on_ranks(2)
def test_random_values_and_single_operators_stay():
    unchanged(sequence_parallel, lambda x: (move(x, "P(sum)", "R") + 1,), local(4, 6))
    unchanged(sequence_parallel, lambda x: (move(x, "P(max)", "R").exp().sin().cos().sum(),), local(4, 6) / 100)
