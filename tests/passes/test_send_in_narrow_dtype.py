import pytest
import torch
from expecttest import TestCase
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dtensor_compile.passes.send_in_narrow_dtype import reduce_in_narrow_dtype, send_in_narrow_dtype
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import local, move, rewritten, unchanged


def cast_behind_a_gather():
    return rewritten(send_in_narrow_dtype, lambda x: (move(x, "S(0)", "R").view(24).bfloat16() + 1,), torch.randn(2, 6))


def cast_before_a_gather():
    return rewritten(send_in_narrow_dtype, lambda x: (move(x.float(), "S(0)", "R") + 1,), torch.randn(2, 6).bfloat16())


class Golden(TestCase):
    def test_cast_behind_a_gather_goes_before_it(self):
        before, after, decisions = run_on_ranks(2, cast_behind_a_gather)[0]
        self.assertExpectedInline(before, """\
x_1: [2, 6]
redistribute: [4, 6] = redistribute(x_1, S(0)->R)
view: [24] = view(redistribute, [24])
_to_copy: [24] = _to_copy(view, dtype=torch.bfloat16)
add: [24] = add(_to_copy, 1)
return [add]
""")  # fmt: skip
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
_to_copy_default: [2, 6] = _to_copy(x_1, dtype=torch.bfloat16)
redistribute_default: [4, 6] = redistribute(_to_copy_default, S(0)->R)
view_default: [24] = view(redistribute_default, [24])
add: [24] = add(view_default, 1)
return [add]
""",
        )
        assert decisions == [("send_in_narrow_dtype", "S(0)->R", "S(0)->R in bfloat16")]

    def test_cast_to_a_wider_dtype_goes_behind_a_gather(self):
        _, after, _ = run_on_ranks(2, cast_before_a_gather)[0]
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
redistribute_default: [4, 6] = redistribute(x_1, S(0)->R)
_to_copy_default: [4, 6] = _to_copy(redistribute_default, dtype=torch.float32)
add: [4, 6] = add(_to_copy_default, 1)
return [add]
""",
        )


@on_ranks(2)
def test_several_casts_to_one_dtype_share_what_is_sent():
    def function(x):
        whole = move(x, "S(0)", "R")
        return whole.bfloat16(), whole.t().bfloat16(), whole.view(24).bfloat16() * 2

    _, after, _ = rewritten(send_in_narrow_dtype, function, torch.randn(2, 6))
    assert after.count("redistribute(") == 1


@on_ranks(2)
def test_what_is_read_in_the_wide_dtype_too_stays():
    def function(x):
        whole = move(x, "S(0)", "R")
        return whole.bfloat16(), whole * 2

    unchanged(send_in_narrow_dtype, function, torch.randn(2, 6))
    unchanged(
        send_in_narrow_dtype,
        lambda x: ((whole := move(x, "S(0)", "R")).bfloat16(), whole),
        torch.randn(2, 6),
    )


@on_ranks(2)
def test_casts_to_different_dtypes_stay():
    def function(x):
        whole = move(x, "S(0)", "R")
        return whole.bfloat16(), whole.half()

    unchanged(send_in_narrow_dtype, function, torch.randn(2, 6))


@on_ranks(2)
def test_wider_integer_and_no_casts_stay():
    unchanged(send_in_narrow_dtype, lambda x: (move(x, "S(0)", "R").double(),), torch.randn(2, 6))
    unchanged(send_in_narrow_dtype, lambda x: (move(x, "S(0)", "R").to(torch.int16),), torch.randn(2, 6))
    unchanged(send_in_narrow_dtype, lambda x: (move(x.bfloat16(), "S(0)", "R"),), torch.randn(2, 6))
    unchanged(send_in_narrow_dtype, lambda x: (move(x, "S(0)", "R") * 2,), torch.randn(2, 6))


@on_ranks(2)
def test_slices_which_send_nothing_stay():
    unchanged(send_in_narrow_dtype, lambda x: (move(x, "R", "S(0)").bfloat16(),), torch.randn(4, 6))


@on_ranks(2)
def test_reductions_stay_unless_they_are_asked_for():
    function = lambda x: (move(x, "P(sum)", "R").bfloat16(),)  # noqa: E731
    unchanged(send_in_narrow_dtype, function, local(4, 6))
    unchanged(reduce_in_narrow_dtype, lambda x: (move(x, "S(0)", "R").bfloat16(),), torch.randn(2, 6))
    _, after, decisions = rewritten(reduce_in_narrow_dtype, function, torch.ones(4, 6))
    assert "_to_copy(x_1" in after and decisions[0][0] == "reduce_in_narrow_dtype"


class Gathered(nn.Module):
    """Parameters in float32 shards, used in bfloat16."""

    def __init__(self, mesh, placements, uses):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(distribute_tensor(torch.randn(7, 5), mesh, placements))
        self.uses = uses

    def forward(self, x):
        whole = self.w.redistribute(placements=[Replicate()] * self.w.device_mesh.ndim)
        local = whole.to_local(grad_placements=[Partial()] * self.w.device_mesh.ndim)
        for _ in range(self.uses):
            x = torch.tanh(x @ local.bfloat16()) @ local.t().bfloat16()
        return x.float()


@on_ranks(2)
def test_sharded_parameters_have_eagers_numbers():
    for uses in (1, 2):
        x = torch.randn(3, 7).bfloat16()
        model = Gathered(make_mesh((2,)), [Shard(0)], uses)
        assert_parity(
            model, [x], loss=torch.sum, backend="dtensor_aten", options={"strict": True}, computed_in=torch.bfloat16
        )


@pytest.mark.slow
@on_ranks(4)
def test_sharded_parameters_on_a_2d_mesh_have_eagers_numbers():
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
        model = Gathered(make_mesh((2, 2), ("dp", "tp")), placements, 1)
        x = torch.randn(3, 7).bfloat16()
        assert_parity(
            model, [x], loss=torch.sum, backend="dtensor_aten", options={"strict": True}, computed_in=torch.bfloat16
        )


@on_ranks(2)
def test_gather_is_bitwise_the_same():
    def function(x):
        return x.redistribute(placements=[Replicate()]).to(torch.bfloat16)

    x = distribute_tensor(torch.randn(5, 3), make_mesh((2,)), [Shard(1)])
    out = torch.compile(function, backend="dtensor_aten", fullgraph=True)(x)
    assert torch.equal(out.to_local(), function(x).to_local()) and isinstance(out, DTensor)
