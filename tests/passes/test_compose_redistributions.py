import pytest
import torch
from expecttest import TestCase
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.passes.compose_redistributions import compose_redistributions
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import SHAPE, local, move, rewritten, unchanged


def all_reduce_of_which_a_part_is_read():
    return rewritten(
        compose_redistributions, lambda x: (move(move(x, "P(sum)", "R").view(4, 6), "R", "S(0)") * 2,), local(4, 6)
    )


def unused():
    def function(x):
        move(x, "S(0)", "R").view(24)
        return (x * 2,)

    return rewritten(compose_redistributions, function, local(2, 6))


class Golden(TestCase):
    def test_all_reduce_of_which_a_part_is_read_becomes_reduce_scatter(self):
        before, after, decisions = run_on_ranks(2, all_reduce_of_which_a_part_is_read)[0]
        self.assertExpectedInline(before, """\
x_1: [4, 6]
redistribute: [4, 6] = redistribute(x_1, P(sum)->R)
view: [4, 6] = view(redistribute, [4, 6])
redistribute_1: [2, 6] = redistribute(view, R->S(0))
mul: [2, 6] = mul(redistribute_1, 2)
return [mul]
""")  # fmt: skip
        self.assertExpectedInline(
            after,
            """\
x_1: [4, 6]
redistribute_default: [2, 6] = redistribute(x_1, P(sum)->S(0))
mul: [2, 6] = mul(redistribute_default, 2)
return [mul]
""",
        )
        assert decisions == [("compose_redistributions", "P(sum)->R->S(0)", "P(sum)->S(0)")]

    def test_unused_goes_away(self):
        _, after, decisions = run_on_ranks(2, unused)[0]
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
mul: [2, 6] = mul(x_1, 2)
return [mul]
""",
        )
        assert decisions == [("compose_redistributions", "S(0)->R", "nothing")]


@on_ranks(2)
def test_gather_then_slice_becomes_all_to_all():
    _, after, _ = rewritten(compose_redistributions, lambda x: (move(move(x, "S(0)", "R"), "R", "S(1)"),), local(2, 6))
    assert after.count("redistribute(") == 1 and "S(0)->S(1)" in after


@on_ranks(2)
def test_chain_becomes_one():
    def function(x):
        for source, target in (("S(0)", "R"), ("R", "S(1)"), ("S(1)", "R")):
            x = move(x, source, target)
        return (x,)

    _, after, decisions = rewritten(compose_redistributions, function, local(2, 6))
    assert after.count("redistribute(") == 1 and len(decisions) == 2


@on_ranks(2)
def test_middle_that_somebody_reads_stays_where_the_direct_way_is_no_cheaper():
    def function(x):
        middle = move(x, "P(sum)", "R")
        return middle + 1, move(middle, "R", "S(0)") + 1

    unchanged(compose_redistributions, function, local(4, 6))


@on_ranks(2)
def test_two_parts_of_one_all_reduce_stay():
    def function(x):
        middle = move(x, "P(sum)", "R")
        return move(middle, "R", "S(1)") + 1, move(middle, "R", "S(0)") + 1

    unchanged(compose_redistributions, function, local(4, 6))


@on_ranks(2)
def test_what_becomes_partial_on_the_way_stays():
    unchanged(compose_redistributions, lambda x: (move(move(x, "R", "P(sum)"), "P(sum)", "S(0)"),), local(4, 6))
    unchanged(compose_redistributions, lambda x: (move(move(x, "S(0)", "R"), "R", "P(sum)"),), local(2, 6))


@on_ranks(2)
def test_different_meshes_or_shapes_stay():
    other = mesh_text(make_mesh((2,), ("other",)))
    unchanged(compose_redistributions, lambda x: (move(move(x, "P(sum)", "R"), "R", "S(0)", on=other),), local(4, 6))
    unchanged(compose_redistributions, lambda x: (move(move(x, "S(0)", "R")[:3], "R", "S(0)", (3, 6)),), local(2, 6))


@on_ranks(2)
def test_result_that_is_returned_is_a_tensor_of_its_own():
    rewritten(compose_redistributions, lambda x: (move(move(x, "S(0)", "R"), "R", "S(0)"),), local(2, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        [[Replicate(), Replicate()], [Shard(0), Shard(1)]],
        [[Shard(1), Shard(0)], [Shard(0), Replicate()]],
    ],
)
@on_ranks(4)
def test_chains_on_a_2d_mesh_with_uneven_shards_have_eagers_numbers(path):
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def function(x):
        for placements in path:
            x = x.redistribute(placements=placements)
        return x * 2

    for start in ([Partial(), Shard(1)], [Partial(), Partial()], [Shard(0), Shard(0)]):
        x = DTensor.from_local(torch.randn(3, 5), mesh, start, run_check=False).requires_grad_()
        loss = lambda out: out.square().sum().full_tensor()  # noqa: E731
        assert_parity(function, [x], loss=loss, backend="dtensor_aten", options={"strict": True})


@on_ranks(2)
def test_compiled_all_reduce_of_which_a_part_is_read_sends_half():
    from dtensor_compile import record

    x = DTensor.from_local(torch.ones(SHAPE), make_mesh((2,)), [Partial()], run_check=False)

    def function(x):
        return x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)])

    sent = []
    for disabled in ((), ("compose_redistributions",)):
        torch._dynamo.reset()
        with record() as recording:
            torch.compile(function, backend="dtensor_aten", options={"disable_passes": disabled})(x)
        sent.append(recording.bytes_sent)
    assert sent == [48, 96]
