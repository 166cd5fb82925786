import torch
from expecttest import TestCase

from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.passes.share_equal_redistributions import share_equal_redistributions
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import local, move, rewritten


def two_readers():
    def function(x):
        return torch.sin(move(x, "S(0)", "R")), torch.cos(move(x, "S(0)", "R"))

    return rewritten(share_equal_redistributions, function, local(2, 6))


class Golden(TestCase):
    def test_two_readers_share_one_gather(self):
        before, after, decisions = run_on_ranks(2, two_readers)[0]
        self.assertExpectedInline(before, """\
x_1: [2, 6]
redistribute: [4, 6] = redistribute(x_1, S(0)->R)
sin: [4, 6] = sin(redistribute)
redistribute_1: [4, 6] = redistribute(x_1, S(0)->R)
cos: [4, 6] = cos(redistribute_1)
return [sin, cos]
""")  # fmt: skip
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
redistribute: [4, 6] = redistribute(x_1, S(0)->R)
sin: [4, 6] = sin(redistribute)
clone_default: [4, 6] = clone(redistribute)
cos: [4, 6] = cos(clone_default)
return [sin, cos]
""",
        )
        assert decisions == [("share_equal_redistributions", "S(0)->R", "shared")]


def assert_unchanged(function, *args):
    before, after, decisions = rewritten(share_equal_redistributions, function, *args)
    assert before == after and decisions == []


@on_ranks(2)
def test_graph_without_equal_ones_stays():
    assert_unchanged(lambda x: (move(x, "S(0)", "R") * 2,), local(2, 6))
    assert_unchanged(lambda x: (move(x, "R", "S(0)") + 1, move(x, "R", "S(1)") + 1), local(4, 6))
    assert_unchanged(lambda x, y: (move(x, "S(0)", "R") + 1, move(y, "S(0)", "R") + 1), local(2, 6), local(2, 6))


@on_ranks(2)
def test_different_global_shapes_stay():
    assert_unchanged(lambda x: (move(x, "R", "S(0)", (4, 6)) + 1, move(x.t(), "R", "S(0)", (6, 4)) + 1), local(4, 6))


@on_ranks(2)
def test_different_meshes_stay():
    other = mesh_text(make_mesh((2,), ("other",)))
    assert_unchanged(lambda x: (move(x, "S(0)", "R") + 1, move(x, "S(0)", "R", on=other) + 1), local(2, 6))


@on_ranks(2)
def test_equal_partial_sums_are_shared():
    _, after, _ = rewritten(
        share_equal_redistributions, lambda x: (move(x, "P(sum)", "R") + 1, move(x, "P(sum)", "R") + 2), local(4, 6)
    )
    assert after.count("redistribute(") == 1


@on_ranks(2)
def test_equal_ones_of_equal_ones_are_shared():
    def function(x):
        a, b = (move(move(x, "S(0)", "R"), "R", "S(1)") for _ in range(2))
        return a + 1, b + 2

    _, after, decisions = rewritten(share_equal_redistributions, function, local(2, 6))
    assert after.count("redistribute(") == 2 and len(decisions) == 2


@on_ranks(2)
def test_equal_ones_that_are_returned_stay_two_tensors():
    rewritten(share_equal_redistributions, lambda x: (move(x, "S(0)", "R"), move(x, "S(0)", "R")), local(2, 6))
    rewritten(share_equal_redistributions, lambda x: (move(x, "S(0)", "R"), move(x, "S(0)", "R").view(24)), local(2, 6))


@on_ranks(2)
def test_equal_ones_behind_views_of_the_same_shape_are_shared():
    def function(x):
        return torch.sin(move(x.view(2, 6), "S(0)", "R")), torch.cos(move(x.detach(), "S(0)", "R"))

    _, after, _ = rewritten(share_equal_redistributions, function, local(2, 6))
    assert after.count("redistribute(") == 1


@on_ranks(2)
def test_equal_ones_of_views_of_other_strides_or_shapes_stay():
    def function(x):
        return move(x.view(2, 2), "S(0)", "R", (4, 2)) + 1, move(x.view(1, 4), "S(0)", "R", (2, 4)) + 1

    assert_unchanged(function, local(2, 2))
