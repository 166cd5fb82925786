import pytest
import torch
from expecttest import TestCase
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dtensor_compile.passes.reduce_before_sending import reduce_before_sending
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import local, move, rewritten, unchanged


def sum_of_a_gathered_tensor():
    return rewritten(
        reduce_before_sending, lambda x: (torch.exp(move(x, "S(0)", "R")).t().sum() * 2,), torch.zeros(2, 6)
    )


class Golden(TestCase):
    def test_sum_of_a_gathered_tensor_becomes_the_sum_of_numbers(self):
        before, after, decisions = run_on_ranks(2, sum_of_a_gathered_tensor)[0]
        self.assertExpectedInline(before, """\
x_1: [2, 6]
redistribute: [4, 6] = redistribute(x_1, S(0)->R)
exp: [4, 6] = exp(redistribute)
t: [6, 4] = t(exp)
sum_1: [] = sum(t)
mul: [] = mul(sum_1, 2)
return [mul]
""")  # fmt: skip
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
exp_default: [2, 6] = exp(x_1)
t_default: [6, 2] = t(exp_default)
sum_default: [] = sum(t_default)
redistribute_default: [] = redistribute(sum_default, P(sum)->R)
mul: [] = mul(redistribute_default, 2)
return [mul]
""",
        )
        assert decisions == [("reduce_before_sending", "S(0)->R", "P(sum)->R")]


@on_ranks(2)
def test_sums_over_other_dims_are_sent_small():
    cases = ("S(0)", "R", (2, 6)), ("P(sum)", "R", (4, 6)), ("P(sum)", "S(0)", (4, 6)), ("S(1)", "S(0)", (4, 3))
    for source, target, sizes in cases:
        for keepdim in (False, True):
            function = lambda x: (move(x, source, target).sum(1, keepdim=keepdim) + 1,)  # noqa: B023, E731
            _, _, decisions = rewritten(reduce_before_sending, function, local(*sizes))
            assert decisions, (source, target)


@on_ranks(2)
def test_maxima_over_other_dims_are_sent_small():
    _, _, decisions = rewritten(reduce_before_sending, lambda x: (move(x, "S(0)", "R").amax(1) + 1,), local(2, 6))
    assert decisions


@on_ranks(2)
def test_maxima_over_ranks_stay_because_of_nan():
    unchanged(reduce_before_sending, lambda x: (move(x, "S(0)", "R").amax(0) + 1,), local(2, 6))
    unchanged(reduce_before_sending, lambda x: (move(x, "P(max)", "R").amax(1) + 1,), local(4, 6))


@on_ranks(2)
def test_sums_in_narrow_dtypes_over_ranks_stay():
    unchanged(reduce_before_sending, lambda x: (move(x, "S(0)", "R").sum(0) + 1,), torch.ones(2, 6).bfloat16())
    unchanged(reduce_before_sending, lambda x: (move(x, "P(sum)", "R").sum(0) + 1,), torch.ones(4, 6).bfloat16())
    _, _, decisions = rewritten(
        reduce_before_sending, lambda x: (move(x, "S(0)", "R").sum(1) + 1,), torch.ones(2, 6).bfloat16()
    )
    assert decisions


@on_ranks(2)
def test_sums_of_minima_and_of_shards_stay():
    unchanged(reduce_before_sending, lambda x: (move(x, "P(min)", "R").sum(1) + 1,), local(4, 6))
    unchanged(reduce_before_sending, lambda x: (move(x, "P(sum)", "S(0)").sum(0) + 1,), local(4, 6))
    unchanged(reduce_before_sending, lambda x: (move(x, "P(sum)", "R").square().sum(0) + 1,), local(4, 6))


@on_ranks(2)
def test_what_somebody_else_reads_stays():
    def function(x):
        whole = move(x, "S(0)", "R")
        return whole.sum(0), torch.relu(whole)

    unchanged(reduce_before_sending, function, local(2, 6))


@on_ranks(2)
def test_what_sends_nothing_stays():
    unchanged(reduce_before_sending, lambda x: (move(x, "R", "S(0)").sum(1),), local(4, 6))


@pytest.mark.slow
@on_ranks(4)
def test_sums_of_uneven_shards_on_a_2d_mesh_have_eagers_numbers():
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def function(x):
        whole = x.redistribute(placements=[Replicate(), Replicate()]).to_local(
            grad_placements=[Replicate(), Replicate()]
        )
        return torch.tanh(whole).sum(0), torch.exp(x.full_tensor()).sum()

    loss = lambda out: out[0].square().sum() + out[1]  # noqa: E731
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0), Shard(1)]).requires_grad_()
    assert_parity(function, [x], loss=loss, backend="dtensor_aten", options={"strict": True}, calls=1)
    x = distribute_tensor(torch.randn(5, 3), mesh, [Shard(1), Shard(1)])
    assert_parity(function, [x], backend="dtensor_aten", dynamic=True, calls=1)
    x = DTensor.from_local(torch.randn(5, 3), mesh, [Partial(), Shard(0)], run_check=False)
    assert_parity(function, [x], backend="dtensor_aten", options={"strict": True}, calls=1)
