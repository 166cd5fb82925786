import pytest
import torch
from expecttest import TestCase
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.passes.merge_sums import merge_sums
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import local, move, rewritten, unchanged


def sum_of_two():
    return rewritten(
        merge_sums, lambda x, y: (move(x, "P(sum)", "S(0)") + move(y, "P(sum)", "S(0)"),), local(4, 6), local(4, 6)
    )


def long_sum():
    def function(x, y, z, w):
        total = w - move(x, "P(sum)", "S(0)")
        return ((total + move(y, "P(sum)", "S(0)").view(2, 6)) - (-move(z, "P(sum)", "S(0)"))) * 2, torch.relu(w)

    return rewritten(merge_sums, function, *(local(4, 6) for _ in range(3)), local(2, 6))


class Golden(TestCase):
    maxDiff = None

    def test_two_terms(self):
        before, after, decisions = run_on_ranks(2, sum_of_two)[0]
        self.assertExpectedInline(before, """\
x_1: [4, 6]
y_1: [4, 6]
redistribute: [2, 6] = redistribute(x_1, P(sum)->S(0))
redistribute_1: [2, 6] = redistribute(y_1, P(sum)->S(0))
add: [2, 6] = add(redistribute, redistribute_1)
return [add]
""")  # fmt: skip
        self.assertExpectedInline(
            after,
            """\
x_1: [4, 6]
y_1: [4, 6]
add_tensor: [4, 6] = add(x_1, y_1)
redistribute_default: [2, 6] = redistribute(add_tensor, P(sum)->S(0))
return [redistribute_default]
""",
        )
        assert decisions == [
            ("merge_sums", "P(sum)->S(0)", "one with redistribute"),
            ("merge_sums", "P(sum)->S(0)", "one with redistribute"),
        ]

    def test_terms_with_signs_behind_views_beside_other_terms(self):
        _, after, decisions = run_on_ranks(2, long_sum)[0]
        self.assertExpectedInline(
            after,
            """\
x_1: [4, 6]
y_1: [4, 6]
z_1: [4, 6]
w_1: [2, 6]
neg_default: [4, 6] = neg(x_1)
add_tensor: [4, 6] = add(neg_default, y_1)
add_tensor_1: [4, 6] = add(add_tensor, z_1)
redistribute_default: [2, 6] = redistribute(add_tensor_1, P(sum)->S(0))
add_tensor_2: [2, 6] = add(w_1, redistribute_default)
mul: [2, 6] = mul(add_tensor_2, 2)
relu: [2, 6] = relu(w_1)
return [mul, relu]
""",
        )
        assert len(decisions) == 3


@on_ranks(2)
def test_terms_that_move_without_a_reduction_are_bitwise_the_same():
    for source, target, sizes in (("S(0)", "R", (2, 6)), ("S(0)", "S(1)", (2, 6)), ("S(1)", "R", (4, 3))):
        x, y = torch.randn(sizes), torch.randn(sizes)
        _, after, _ = rewritten(merge_sums, lambda x, y: (move(x, source, target) + move(y, source, target),), x, y)
        assert after.count("redistribute(") == 1


@on_ranks(2)
def test_different_groups_are_merged_apart():
    def function(x, y, z, w):
        return (move(x, "P(sum)", "R") + move(z, "S(0)", "R") + move(y, "P(sum)", "R") + move(w, "S(0)", "R"),)

    _, after, decisions = rewritten(merge_sums, function, local(4, 6), local(4, 6), local(2, 6), local(2, 6))
    assert after.count("redistribute(") == 2 and len(decisions) == 4


@on_ranks(2)
def test_averages_are_merged():
    _, after, _ = rewritten(
        merge_sums, lambda x, y: (move(x, "P(avg)", "R") + move(y, "P(avg)", "R"),), local(4, 6), local(4, 6)
    )
    assert after.count("redistribute(") == 1


@on_ranks(2)
def test_sums_without_a_second_term_stay():
    unchanged(merge_sums, lambda x: (move(x, "P(sum)", "R") + 1,), local(4, 6))
    unchanged(merge_sums, lambda x: (move(x, "P(sum)", "R") + x,), local(4, 6))

    def twice(x):
        y = move(x, "P(sum)", "R")
        return (y + y,)

    unchanged(merge_sums, twice, local(4, 6))


@on_ranks(2)
def test_terms_that_somebody_else_reads_stay():
    def function(x, y):
        a, b = move(x, "P(sum)", "R"), move(y, "P(sum)", "R")
        return a + b, torch.relu(a)

    unchanged(merge_sums, function, local(4, 6), local(4, 6))

    def returned(x, y):
        a = move(x, "P(sum)", "R")
        return a + move(y, "P(sum)", "R"), a

    unchanged(merge_sums, returned, local(4, 6), local(4, 6))


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_reductions_that_are_no_sums_stay(op):
    run_on_ranks(2, no_sum, op)


def no_sum(op):
    unchanged(merge_sums, lambda x, y: (move(x, f"P({op})", "R") + move(y, f"P({op})", "R"),), local(4, 6), local(4, 6))


@on_ranks(2)
def test_what_becomes_partial_stays():
    unchanged(merge_sums, lambda x, y: (move(x, "R", "P(sum)") + move(y, "R", "P(sum)"),), local(4, 6), local(4, 6))


@on_ranks(2)
def test_slices_which_send_nothing_stay():
    unchanged(merge_sums, lambda x, y: (move(x, "R", "S(0)") + move(y, "R", "S(0)"),), local(4, 6), local(4, 6))


@on_ranks(2)
def test_factors_broadcasts_and_promotions_stay():
    factor = lambda x, y: (torch.add(move(x, "P(sum)", "R"), move(y, "P(sum)", "R"), alpha=3),)  # noqa: E731
    unchanged(merge_sums, factor, local(4, 6), local(4, 6))
    unchanged(merge_sums, lambda x, y: (move(x, "P(sum)", "R") + move(y, "P(sum)", "R", (6,)),), local(4, 6), local(6))
    unchanged(
        merge_sums, lambda x, y: (move(x, "P(sum)", "R") + move(y, "P(sum)", "R"),), local(4, 6), local(4, 6).double()
    )


@on_ranks(2)
def test_different_specs_shapes_or_meshes_stay():
    other = mesh_text(make_mesh((2,), ("other",)))
    unchanged(merge_sums, lambda x, y: (move(x, "P(sum)", "R") + move(y, "S(0)", "R"),), local(4, 6), local(2, 6))
    unchanged(
        merge_sums, lambda x, y: (move(x, "P(sum)", "R") + move(y, "P(sum)", "R", on=other),), local(4, 6), local(4, 6)
    )


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12, bias=False) for _ in range(4))

    def forward(self, x):
        return x + self.o(torch.sigmoid(self.q(x)) * self.k(x) - self.v(x))


def assert_projections(mesh, layout, batch):
    torch.manual_seed(0)
    plan = {name: ColwiseParallel(input_layouts=layout) for name in "qkv"} | {
        "o": RowwiseParallel(output_layouts=layout)
    }
    model = parallelize_module(Projections(), mesh, plan)
    x = torch.randn(batch, 4, 12, requires_grad=True)
    assert_parity(model, [x], loss=lambda out: out.square().sum(), backend="dtensor_aten", options={"strict": True})


@pytest.mark.slow
@on_ranks(2)
def test_projections_have_eagers_numbers():
    assert_projections(make_mesh((2,), ("tp",)), Shard(1), 3)
    assert_projections(make_mesh((2,), ("tp",)), Replicate(), 3)


@pytest.mark.slow
@on_ranks(4)
def test_projections_on_a_dim_of_a_2d_mesh_have_eagers_numbers():
    assert_projections(make_mesh((2, 2), ("dp", "tp"))["tp"], Shard(1), 2)


@pytest.mark.slow
@on_ranks(4)
def test_uneven_partial_sums_on_a_2d_mesh_have_eagers_numbers():
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def function(x, w, v):
        a, b = x @ w, x @ v  # partial over the second dim
        a, b = (y.redistribute(placements=[Shard(0), Shard(1)]) for y in (a, b))
        total = a - b + x.redistribute(placements=[Shard(0), Shard(1)])
        return total.redistribute(placements=[Replicate(), Replicate()]).to_local()

    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(5, 7), mesh, [Shard(0), Shard(1)]).requires_grad_()
    w, v = (distribute_tensor(torch.randn(7, 7), mesh, [Replicate(), Shard(0)]).requires_grad_() for _ in range(2))
    loss = lambda out: out.square().sum()  # noqa: E731
    assert_parity(function, [x, w, v], loss=loss, backend="dtensor_aten", options={"strict": True})
    assert_parity(function, [x.detach(), w.detach(), v.detach()], backend="dtensor_aten", dynamic=True)


@on_ranks(2)
def test_partial_inputs_have_eagers_numbers():
    from torch.distributed.tensor import DTensor

    mesh = make_mesh((2,), ("tp",))
    x, y = (DTensor.from_local(local(3, 5), mesh, [Partial()], run_check=False) for _ in range(2))
    for target in (Replicate(), Shard(0), Shard(1)):

        def function(x, y):
            return x.redistribute(placements=[target]) + y.redistribute(placements=[target])

        assert_parity(function, [x, y], backend="dtensor_aten", options={"strict": True})
