import torch
from expecttest import TestCase

from dtensor_compile.passes.cancel_inverse_pairs import cancel_inverse_pairs
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import SHAPE, local, move, rewritten


def inverse_pair():
    def function(x):
        return (torch.relu(move(move(x * 2, "S(0)", "R"), "R", "S(0)")),)

    return rewritten(cancel_inverse_pairs, function, local(2, 6))


def pair_whose_middle_is_read():
    def function(x):
        middle = move(x * 2, "S(0)", "R")
        return middle + 1, torch.relu(move(middle, "R", "S(0)"))

    return rewritten(cancel_inverse_pairs, function, local(2, 6))


def identity():
    return rewritten(cancel_inverse_pairs, lambda x: (move(x, "S(0)", "S(0)") + 1,), local(2, 6))


class Golden(TestCase):
    maxDiff = None

    def test_inverse_pair_goes_away(self):
        before, after, decisions = run_on_ranks(2, inverse_pair)[0]
        self.assertExpectedInline(before, """\
x_1: [2, 6]
mul: [2, 6] = mul(x_1, 2)
redistribute: [4, 6] = redistribute(mul, S(0)->R)
redistribute_1: [2, 6] = redistribute(redistribute, R->S(0))
relu: [2, 6] = relu(redistribute_1)
return [relu]
""")  # fmt: skip
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
mul: [2, 6] = mul(x_1, 2)
clone_default: [2, 6] = clone(mul)
relu: [2, 6] = relu(clone_default)
return [relu]
""",
        )
        assert decisions == [("cancel_inverse_pairs", "S(0)->R->S(0)", "nothing")]

    def test_pair_whose_middle_is_read_keeps_its_first_half(self):
        _, after, _ = run_on_ranks(2, pair_whose_middle_is_read)[0]
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
mul: [2, 6] = mul(x_1, 2)
redistribute: [4, 6] = redistribute(mul, S(0)->R)
add: [4, 6] = add(redistribute, 1)
clone_default: [2, 6] = clone(mul)
relu: [2, 6] = relu(clone_default)
return [add, relu]
""",
        )

    def test_identity_goes_away(self):
        _, after, _ = run_on_ranks(2, identity)[0]
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
clone_default: [2, 6] = clone(x_1)
add: [2, 6] = add(clone_default, 1)
return [add]
""",
        )


def assert_unchanged(function, *args):
    before, after, decisions = rewritten(cancel_inverse_pairs, function, *args)
    assert before == after and decisions == []


@on_ranks(2)
def test_graph_without_pairs_stays():
    assert_unchanged(lambda x: (move(x + 1, "S(0)", "R") * 2,), local(2, 6))
    assert_unchanged(lambda x: (move(move(x, "S(0)", "R"), "R", "S(1)"),), local(2, 6))
    assert_unchanged(lambda x: (move(move(x, "S(0)", "R") + 1, "R", "S(0)"),), local(2, 6))


@on_ranks(2)
def test_partial_pairs_stay_because_they_may_round():
    assert_unchanged(lambda x: (move(move(x, "P(sum)", "R"), "R", "P(sum)"),), local(4, 6))
    assert_unchanged(lambda x: (move(move(x, "R", "P(sum)"), "P(sum)", "R"),), local(4, 6))


@on_ranks(2)
def test_pair_on_different_meshes_stays():
    named = make_mesh((2,), ("other",))
    from dtensor_compile.ir.mesh import mesh_text

    assert_unchanged(lambda x: (move(move(x, "S(0)", "R"), "R", "S(0)", on=mesh_text(named)),), local(2, 6))


@on_ranks(2)
def test_pair_of_different_global_shapes_stays():
    """Two rows on each rank are gathered to four; of three rows, the second rank has one."""
    assert_unchanged(lambda x: (move(move(x, "S(0)", "R", (4, 6))[:3], "R", "S(0)", (3, 6)) + 1,), local(2, 6))


@on_ranks(2)
def test_original_that_is_not_contiguous_gets_the_strides_of_the_result():
    _, after, decisions = rewritten(
        cancel_inverse_pairs, lambda x: (move(move(x.t(), "S(0)", "R"), "R", "S(0)"),), local(6, 2)
    )
    assert "clone" in after and "redistribute" not in after and decisions


@on_ranks(2)
def test_pair_on_an_input_that_is_returned_does_not_return_the_input():
    rewritten(cancel_inverse_pairs, lambda x: (move(move(x, "S(0)", "R"), "R", "S(0)"),), local(2, 6))
    rewritten(cancel_inverse_pairs, lambda x: (move(x, "S(0)", "S(0)"),), local(2, 6))
    rewritten(cancel_inverse_pairs, lambda x: (move(move(x, "S(0)", "R"), "R", "S(0)").view(12),), local(2, 6))


@on_ranks(2)
def test_pair_on_an_intermediate_that_is_returned_too_gives_two_tensors():
    def function(x):
        y = x + 1
        return y, move(move(y, "S(0)", "R"), "R", "S(0)")

    rewritten(cancel_inverse_pairs, function, local(2, 6))


@on_ranks(2)
def test_chain_of_pairs_goes_away():
    def function(x):
        for _ in range(3):
            x = move(move(x, "S(0)", "R"), "R", "S(0)")
        return (x * 2,)

    _, after, decisions = rewritten(cancel_inverse_pairs, function, local(2, 6))
    assert "redistribute" not in after and len(decisions) == 3


@on_ranks(2)
def test_compiled_input_that_is_changed_afterwards_keeps_the_output():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def function(x):
        y = x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)])
        x.add_(1)
        return y

    def fresh():
        return distribute_tensor(torch.arange(24.0).reshape(SHAPE), make_mesh((2,)), [Shard(0)])

    x, z = fresh(), fresh()
    wanted, out = function(x), torch.compile(function, backend="dtensor", fullgraph=True)(z)
    assert torch.equal(out.to_local(), wanted.to_local()) and torch.equal(x.to_local(), z.to_local())
    z.add_(1)
    assert torch.equal(out.to_local(), wanted.to_local())
