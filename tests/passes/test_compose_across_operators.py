import pytest
import torch
from expecttest import TestCase
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.passes.compose_across_operators import compose_across_operators
from dtensor_compile.testing import assert_parity, make_mesh, on_ranks, run_on_ranks
from tests.passes.graphs import local, move, rewritten, unchanged


def sequence_to_heads():
    def function(x):
        whole = move(x, "S(1)", "R", (2, 4, 6))
        return (move(whole.view(2, 4, 2, 3).transpose(1, 2), "R", "S(1)", (2, 2, 4, 3)) * 2,)

    return rewritten(compose_across_operators, function, local(2, 2, 6))


def gathered_and_cut_the_same_way():
    def function(x):
        return (move(torch.relu(move(x, "S(0)", "R")).t(), "R", "S(1)", (6, 4)),)

    return rewritten(compose_across_operators, function, local(2, 6))


class Golden(TestCase):
    maxDiff = None

    def test_gather_of_the_sequence_cut_by_heads_becomes_all_to_all(self):
        before, after, decisions = run_on_ranks(2, sequence_to_heads)[0]
        self.assertExpectedInline(before, """\
x_1: [2, 2, 6]
redistribute: [2, 4, 6] = redistribute(x_1, S(1)->R)
view: [2, 4, 2, 3] = view(redistribute, [2, 4, 2, 3])
transpose: [2, 2, 4, 3] = transpose(view, 1, 2)
redistribute_1: [2, 1, 4, 3] = redistribute(transpose, R->S(1))
mul: [2, 1, 4, 3] = mul(redistribute_1, 2)
return [mul]
""")  # fmt: skip
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 2, 6]
view_default: [2, 2, 2, 3] = view(x_1, [2, 2, 2, 3])
transpose_int: [2, 2, 2, 3] = transpose(view_default, 1, 2)
redistribute_default: [2, 1, 4, 3] = redistribute(transpose_int, S(2)->S(1))
permute_default: [2, 4, 1, 3] = permute(redistribute_default, [0, 2, 1, 3])
clone_default: [2, 4, 1, 3] = clone(permute_default, memory_format=torch.contiguous_format)
permute_default_1: [2, 1, 4, 3] = permute(clone_default, [0, 2, 1, 3])
mul: [2, 1, 4, 3] = mul(permute_default_1, 2)
return [mul]
""",
        )
        assert decisions == [("compose_across_operators", "S(1)->R->R->S(1)", "S(2)->S(1)")]

    def test_what_is_gathered_and_cut_the_same_way_is_not_sent(self):
        _, after, _ = run_on_ranks(2, gathered_and_cut_the_same_way)[0]
        self.assertExpectedInline(
            after,
            """\
x_1: [2, 6]
relu_default: [2, 6] = relu(x_1)
t_default: [6, 2] = t(relu_default)
clone_default: [6, 2] = clone(t_default)
return [clone_default]
""",
        )


@on_ranks(2)
def test_merged_and_split_dims_keep_their_shards():
    _, after, _ = rewritten(
        compose_across_operators, lambda x: (move(move(x, "S(0)", "R").view(24), "R", "S(0)", (24,)) + 1,), local(2, 6)
    )
    assert "redistribute" not in after
    _, after, _ = rewritten(
        compose_across_operators,
        lambda x: (move(move(x, "S(0)", "R", (8,)).view(4, 2), "R", "S(0)", (4, 2)) + 1,),
        local(4),
    )
    assert "redistribute" not in after


@on_ranks(2)
def test_partial_sums_pass_views_and_signs():
    _, after, _ = rewritten(
        compose_across_operators, lambda x: (move(-move(x, "P(sum)", "R").t(), "R", "S(0)", (6, 4)) + 1,), local(4, 6)
    )
    assert "P(sum)->S(0)" in after and after.count("redistribute(") == 1


@on_ranks(2)
def test_returned_view_of_an_input_is_a_tensor_of_its_own():
    rewritten(compose_across_operators, lambda x: (move(move(x, "S(0)", "R").t(), "R", "S(1)", (6, 4)),), local(2, 6))


@on_ranks(2)
def test_operators_with_numbers_of_the_program_stay():
    """A program may multiply by its own rank, or take the part of it: the graph does not say."""
    unchanged(compose_across_operators, lambda x: (move(move(x, "S(0)", "R") * 3, "R", "S(0)"),), local(2, 6))
    unchanged(
        compose_across_operators, lambda x: (move(move(x, "S(0)", "R")[:, :4], "R", "S(0)", (4, 4)),), local(2, 6)
    )


@on_ranks(2)
def test_partial_sums_do_not_pass_what_is_not_linear():
    unchanged(compose_across_operators, lambda x: (move(torch.relu(move(x, "P(sum)", "R")), "R", "S(0)"),), local(4, 6))
    unchanged(compose_across_operators, lambda x: (move(-move(x, "P(max)", "R"), "R", "S(0)"),), local(4, 6))


@on_ranks(2)
def test_views_across_the_bounds_of_shards_stay():
    unchanged(
        compose_across_operators, lambda x: (move(move(x, "S(1)", "R").view(24), "R", "S(0)", (24,)),), local(4, 3)
    )
    unchanged(
        compose_across_operators,
        lambda x: (move(move(x, "S(0)", "R", (4,)).view(1, 4), "R", "S(0)", (1, 4)),),
        local(2),
    )
    unchanged(
        compose_across_operators,
        lambda x: (move(move(x, "S(0)", "R", (6,)).view(3, 2), "R", "S(0)", (3, 2)),),
        local(3),
    )


@on_ranks(2)
def test_middles_that_somebody_reads_stay():
    def function(x):
        whole = torch.relu(move(x, "S(0)", "R"))
        return whole, move(whole, "R", "S(1)")

    unchanged(compose_across_operators, function, local(2, 6))


@on_ranks(2)
def test_different_meshes_and_other_shapes_stay():
    other = mesh_text(make_mesh((2,), ("other",)))
    unchanged(
        compose_across_operators,
        lambda x: (move(torch.relu(move(x, "S(0)", "R")), "R", "S(0)", on=other),),
        local(2, 6),
    )


def random_chains(seeds):
    """Every pair of specs around random permutations, views and elementwise operators: results are compared bit by
    bit.
    """
    import random

    mesh = make_mesh((2, 2), ("a", "b"))
    text = mesh_text(mesh)
    from dtensor_compile.ir.mesh import parse_mesh
    from dtensor_compile.ir.spec import parse_spec
    from dtensor_compile.ops.expand import local_shape

    layout, changed = parse_mesh(text), 0
    coordinate = mesh.get_coordinate()
    for seed in seeds:
        choose = random.Random(seed)
        shape = choose.choice([(4, 8, 4), (8, 4), (4, 2, 6), (5, 4, 2)])
        specs = ["R", *(f"S({d})" for d in range(len(shape))), "P(sum)"]
        source = choose.choice(specs) + choose.choice(specs)
        operators, out = [], shape
        for _ in range(choose.randint(1, 4)):
            kind = choose.choice(["permute", "merge", "split", "neg"])
            if kind == "permute":
                order = choose.sample(range(len(out)), len(out))
                operators.append(lambda x, order=order: x.permute(order))
                out = tuple(out[d] for d in order)
            elif kind == "merge" and len(out) > 1:
                d = choose.randrange(len(out) - 1)
                out = (*out[:d], out[d] * out[d + 1], *out[d + 2 :])
                operators.append(lambda x, out=out: x.contiguous().view(out))
            elif kind == "split":
                d = choose.randrange(len(out))
                factor = choose.choice([f for f in (1, 2, 4) if out[d] % f == 0])
                out = (*out[:d], factor, out[d] // factor, *out[d + 1 :])
                operators.append(lambda x, out=out: x.contiguous().view(out))
            else:
                operators.append(torch.neg)
        target = "".join(choose.choice(["R", *(f"S({d})" for d in range(len(out)))]) for _ in range(2))

        def function(x):
            x = move(x, source, "RR", shape, on=text)
            for operator in operators:
                x = operator(x)
            return (move(x, "RR", target, out, on=text),)

        x = torch.randint(-9, 9, local_shape(parse_spec(source), layout, coordinate, shape)).float()
        _, _, decisions = rewritten(compose_across_operators, function, x)
        changed += bool(decisions)
    return changed


@pytest.mark.slow
def test_random_chains_have_the_same_numbers():
    counts = run_on_ranks(4, random_chains, list(range(60)))
    assert len(set(counts)) == 1 and counts[0] > 10, counts


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sequence_to_heads_has_eagers_numbers(world):
    run_on_ranks(world, assert_sequence_to_heads, world)


def assert_sequence_to_heads(world):
    mesh = make_mesh((world,), ("sp",))

    def function(x):
        heads = (
            x.redistribute(placements=[Replicate()])
            .view(2, 8, 4, 3)
            .transpose(1, 2)
            .redistribute(placements=[Shard(1)])
        )
        back = torch.tanh(heads).redistribute(placements=[Replicate()]).transpose(1, 2)
        return back.redistribute(placements=[Shard(1)]) * 2

    x = DTensor.from_local(torch.randn(2, 8 // world, 12), mesh, [Shard(1)], run_check=False)
    assert_parity(function, [x], backend="dtensor_aten", options={"strict": True})  # eager has no backward of it
    from dtensor_compile import record

    sent = []
    for disabled in ((), ("compose_across_operators",)):
        torch._dynamo.reset()
        with record() as recording:
            torch.compile(function, backend="dtensor_aten", options={"disable_passes": disabled})(x)
        sent.append(recording.bytes_sent)
    assert sent[0] == 0 < sent[1]  # what stands between is elementwise: everything stays where it was
