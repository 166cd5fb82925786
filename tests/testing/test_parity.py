"""The harness itself: it sees every kind of difference, names the place, and finds what makes it."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile.graph.nodes import redistributions
from dtensor_compile.passes import PASSES
from dtensor_compile.stages import joint
from dtensor_compile.testing import RankError, compare_steps, compare_values, make_mesh, on_ranks, parity
from dtensor_compile.testing.check import check_case
from dtensor_compile.testing.compare_values import Allowed
from dtensor_compile.testing.parity import Settings, case_of, compare_case, sum_of_squares
from tests.stages import with_run

# ---- values --------------------------------------------------------------------------------------------------------


def one(eager, compiled, **kwargs):
    (difference,) = compare_values("x", eager, compiled, **kwargs)
    return difference


def test_the_place_of_the_largest_difference_and_the_tolerance_are_named():
    a = torch.ones(3, 4)
    b = a.clone()
    b[1, 2], b[0, 0] = 1.5, 1.1
    found = one(a, b)
    assert found.what == "x at local index (1, 2)" and (found.eager, found.compiled) == (1.0, 1.5)
    assert str(found) == (
        "rank 0: x at local index (1, 2): eager 1.0, compiled 1.5, relative difference 5.00e-01, "
        "allowed 1e-05 (testing.compare_values.TOLERANCE of torch.float32)"
    )
    assert one(a, b, allowed=Allowed(relative=0.2)).tolerance == "0.2 (as given)"
    assert "computed in torch.bfloat16" in one(a, b, computed_in=torch.bfloat16).tolerance
    assert not compare_values("x", a, b, allowed=Allowed(relative=0.6))


def test_what_is_not_finite_hides_nothing():
    inf, nan = float("inf"), float("nan")
    assert not compare_values("x", torch.tensor([-inf, nan, 1.0]), torch.tensor([-inf, nan, 1.0]))
    assert one(torch.tensor([-inf, 1.0]), torch.tensor([-inf, 2.0])).what == "x at local index (1,)"
    assert one(torch.tensor([inf, 1.0]), torch.tensor([-inf, 1.0])).what == "x at local index (0,)"
    assert one(torch.tensor([1.0, nan]), torch.tensor([1.0, 3.0])).what == "x at local index (1,)"
    assert one(torch.tensor([1.0, 2.0]), torch.tensor([1.0, inf])).what == "x at local index (1,)"


@pytest.mark.parametrize("other, what", [
    (torch.ones(2, 3).t(), "x.stride"), (torch.ones(2, 3), "x.shape"),
    (torch.ones(3, 2, dtype=torch.float64), "x.dtype"),
    (torch.ones(3, 2).requires_grad_(), "x.requires_grad"), (None, "x"), ((torch.ones(3, 2),), "x: structure"),
])  # fmt: skip
def test_facts_are_compared(other, what):
    assert what in [d.what for d in compare_values("x", torch.ones(3, 2), other)]


def test_strides_of_dims_without_a_second_element_mean_nothing():
    assert not compare_values("x", torch.ones(3, 1), torch.ones(3, 1).as_strided((3, 1), (1, 7)))
    assert not compare_values("x", torch.ones(0, 4), torch.ones(4, 0).t())
    assert one(torch.ones(3, 1), torch.ones(6).as_strided((3, 1), (2, 1))).what == "x.stride"


def test_integers_and_plain_values_are_compared_exactly():
    assert one(torch.tensor([1, 2]), torch.tensor([1, 3])).what == "x at local index (1,)"
    assert one(1, True).compiled is True
    assert not compare_values("x", float("nan"), float("nan"))


@on_ranks(2)
def test_placements_are_compared():
    mesh = make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    found = [d.what for d in compare_values("x", x, x.redistribute(placements=[Replicate()]))]
    assert found == ["x.placements", "x.local shape"]


# ---- steps ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return self.two(nn.functional.dropout(self.one(x).relu(), 0.5))


def block():
    return parallelize_module(Block(), make_mesh((2,), ("tp",)), {"one": ColwiseParallel(), "two": RowwiseParallel()})


@on_ranks(2)
def test_a_training_step_with_an_optimizer_a_buffer_and_dropout():
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    case = case_of(block(), [torch.randn(3, 6)], loss=sum_of_squares, optimizer=adamw, calls=3)
    comparison = compare_case(case, Settings("dtensor_aten"))
    assert not comparison.differences and comparison.tensors > 20


def test_a_wrong_backend_is_seen_in_everything_that_it_leaves_behind():
    model = nn.Linear(3, 3)

    def wrong(gm, inputs):
        return lambda *args: [2 * out for out in gm(*args)]

    def draws(gm, inputs):
        return lambda *args: (torch.rand(1), gm(*args))[1]

    x = torch.randn(2, 3, requires_grad=True)
    found = compare_steps(
        model, [x], loss=sum_of_squares, optimizer=functools.partial(torch.optim.SGD, lr=0.1), backend=wrong
    )
    kinds = {d.what.partition("[")[0].partition(" at")[0] for d in found}
    assert {"output", "input.grad", "grad.weight", "state.weight"} <= kinds
    assert [d.what.partition(" at")[0] for d in compare_steps(model, [x], backend=draws)] == ["random state"]


# ---- bisection -----------------------------------------------------------------------------------------------------


def seeded(name):
    """While active, the pass of that name is a wrong one: what the first redistribution brings grows a
    little.
    """

    def wrong(graph):
        for node in redistributions(graph):
            with graph.inserting_after(node):
                twice = graph.call_function(torch.ops.aten.mul.Scalar, (node, 1.001))
            twice.meta = dict(node.meta)
            node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
            break
        return []

    wrong.__name__ = name
    return with_run(joint, "PLAN", name, wrong)


def check_seeded(name, settings):
    case = case_of(block(), [torch.randn(3, 6)], loss=sum_of_squares)
    with seeded(name):
        check_case(case, settings)


@pytest.mark.slow  # test_command.py has it, too
@pytest.mark.parametrize("name", [PASSES[0].__name__, PASSES[-1].__name__])
def test_a_wrong_pass_is_caught_and_named(name):
    with pytest.raises(
        RankError, match=f"differs from eager[\\s\\S]*rank 0: output[\\s\\S]*the graph pass {name} makes"
    ):
        on_ranks(2)(check_seeded)(name, Settings("dtensor_aten"))


@on_ranks(2)
def test_inputs_that_are_not_added_up_stay_so():
    """Copies for the runs are placed as what was given: `clone` of a DTensor would add it up."""
    seen = []

    def program(x):
        seen.append(x.placements)
        return x * 2

    x = DTensor.from_local(torch.ones(3), make_mesh((2,)), [Partial()], run_check=False).requires_grad_()
    assert not compare_steps(program, [x], backend="dtensor_aten")
    assert set(seen) == {(Partial(),)}


# ---- the decorator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 4])
@parity(mesh=(2, 2), names=("dp", "tp"), backend="dtensor_aten")
def test_a_decorated_function_is_a_test(rows, mesh):
    x = distribute_tensor(torch.randn(rows, 6), mesh["dp"], [Shard(0)])
    weight = distribute_tensor(torch.randn(6, 8), mesh["tp"], [Shard(1)]).requires_grad_()
    return (lambda x, weight: (x * 2, weight.relu().redistribute(placements=[Replicate()]))), [x, weight]


@parity(mesh=(2,), backend="dtensor_aten")
def returns_nothing():
    return (lambda: None), []


def test_a_comparison_of_nothing_fails():
    with pytest.raises(RankError, match="nothing to compare"):
        returns_nothing()
