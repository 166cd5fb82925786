"""Random programs with fixed seeds: compiled equals eager, with all passes and with one alone. ``make fuzz`` is the
long run.
"""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.testing import run_on_ranks
from dtensor_compile.testing.bisect import pass_names
from dtensor_compile.testing.parity import Settings
from tests.fuzz.programs import Program, make_program, smaller, verdict
from tests.fuzz.run import judge

TWO = [(2,), (2, 1), (1, 2)]


def made(draw, meshes, lines=6):
    with simulated_job(4, 0):
        return make_program(draw, meshes, lines)


def check(program, kernels="aten"):
    """Fails with the program where it differs on the ranks."""
    alone = [f"{name} alone" for name in pass_names(Settings())]
    variants = ["all", alone[len(program.source) % len(alone)]]
    result, found = judge(program, variants, kernels)
    assert result in ("equal", "refused"), f"{program}\n" + "\n".join(found)


# ---- the fuzzer itself ---------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_program():
    one, two = (made(random.Random(7), TWO) for _ in range(2))
    assert one == two and "def program(" in str(one)


def test_a_difference_is_seen_and_a_refusal_is_none():
    ones = "tensor(mesh, 0, [4, 4], torch.float32, [Shard(0)], True)"
    differs = Program((2,), (ones,), ("v0 = a0 * (2 if torch.compiler.is_compiling() else 1)", "v1 = v0 + 1"), ("v1",))
    result, found = run_on_ranks(2, verdict, differs, timeout=280)[0]
    assert result == "differs" and "rank 0: output" in found[0] and any("rank 1: input.grad" in d for d in found)
    refused = Program((2,), (ones,), ("v0 = a0.view(3, 5)",), ("v0",))
    assert run_on_ranks(2, verdict, refused, timeout=280)[0][0] == "refused"


@pytest.mark.slow
def test_what_eager_refuses_on_some_ranks_only_ends_the_job():
    some = Program(
        (2,),
        ("tensor(mesh, 0, [4, 4], torch.float32, [Shard(0)], True)",),
        ("v0 = a0[1 // a0.device_mesh.get_rank()]",),
        ("v0",),
    )
    assert judge(some, ["all"], "aten")[0] == "refused"


def test_smaller_programs_have_one_part_less():
    program = Program((2,), ("x",), ("v0 = a0 + 1", "v1 = v0 * 2", "v2 = a0 * 3"), ("v1", "v2"), True)
    small = list(smaller(program))
    assert {p.lines for p in small} == {program.lines, program.lines[:2], ("v0 = a0 + 1", "v2 = a0 * 3")}
    assert {p.outputs for p in small} == {("v1",), ("v2",), ("v1", "v2")} and small[-1].dynamic is None


def examples(most):
    return settings(
        max_examples=most, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


@examples(4)
@given(st.randoms(use_true_random=False))
def test_programs_on_two_ranks(draw):
    program = made(draw, TWO)
    if program is not None:
        check(program)


@pytest.mark.slow
@examples(12)
@given(st.randoms(use_true_random=False))
def test_more_programs_on_two_ranks(draw):
    program = made(draw, TWO)
    if program is not None:
        check(program)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_programs_on_four_ranks(seed):
    program = made(random.Random(seed), [(4,), (2, 2), (1, 2, 2)], lines=4)
    assert program is not None
    check(program)


# ---- found by the fuzzer -------------------------------------------------------------------------------------------


def test_the_square_of_a_symbolic_size_in_a_stride():
    x = "tensor(mesh, 0, [6, 3], torch.float32, [Replicate()], True)"
    check(Program((2,), (x,), ("v0 = torch.matmul(a0, a0.transpose(-1, -2))", "v1 = v0.unsqueeze(0)"), ("v1",), True))


@pytest.mark.slow
def test_a_product_of_three_symbolic_sizes_in_a_stride():
    x = "tensor(mesh, 1, [2, 3, 6], torch.float32, [Shard(0), Partial()], True)"
    check(
        Program((2, 1), (x,), ("v0 = torch.where(a0 > 0, a0, -a0)", "v1 = torch.stack([v0, v0 * 2], 1)"), ("v1",), True)
    )


def test_a_size_that_is_first_needed_when_others_are_computed_from_it():
    x = 'tensor(mesh["d1"], 0, [7], torch.float32, [Shard(0)], True)'
    lines = ("v0 = a0.redistribute(placements=[Replicate()])", "v1 = torch.cat([v0, v0], 0)")
    check(Program((2, 1), (x,), lines, ("v1",), True))


def test_views_for_which_the_input_was_redistributed_are_not_views_of_it():
    x = "tensor(mesh, 0, [7, 3], torch.float32, [Shard(1)], True)"
    check(Program((2,), (x,), ("v0 = a0.narrow(1, 2, 1)", "v1 = v0.t()", "v2 = a0 + 1"), ("v0", "v1", "v2")))
    check(Program((2,), (x,), ("v0 = a0.narrow(1, 2, 1)",), ("v0",), True))


def test_the_gradient_of_a_view_along_a_mesh_dim_of_one_rank():
    x = "tensor(mesh, 1, [7, 2], torch.float32, [Shard(0), Shard(1)], True)"
    check(Program((2, 1), (x,), ("v0 = a0.select(1, 0)",), ("v0",)))


def test_a_row_wise_lookup_along_a_mesh_dim_of_one_rank():
    x = "tensor(mesh, 1, [8, 6], torch.float32, [Shard(1), Shard(0)], True)"
    i = "indices(mesh, 2, [2, 5], 8, [Shard(0), Replicate()])"
    check(Program((2, 1), (x, i), ("v0 = F.embedding(a1, a0)", "v1 = F.gelu(v0)"), ("v1",)))


def test_a_result_with_strided_shards():
    x = "tensor(mesh, 1, [5, 7], torch.float32, [Replicate(), Shard(1)], False)"
    check(Program((1, 2), (x,), ("v0 = a0 * 2", "v1 = v0.reshape([35])"), ("v0", "v1")))


@pytest.mark.slow
def test_a_redistribution_there_and_back_of_symbolic_sizes():
    x = "tensor(mesh, 0, [1, 7, 6, 4], torch.float32, [Shard(3)], False)"
    lines = ("v0 = a0.redistribute(placements=[Shard(2)])", "v1 = v0.redistribute(placements=[Shard(3)])")
    check(Program((2,), (x,), lines, ("v0", "v1"), True))


@pytest.mark.slow
def test_a_stride_that_is_symbolic_where_no_size_is():
    x = "tensor(mesh, 2, [1, 8], torch.float32, [Replicate()], True)"
    y = "tensor(mesh, 1, [6, 4, 8], torch.float32, [Shard(0)], True)"
    lines = (
        "v0 = a0.narrow(1, 4, 2)",
        "v1 = v0 + v0",
        "v2 = a1.redistribute(placements=[Replicate()])",
        "v3 = F.linear(v2, a0)",
    )
    check(Program((2,), (x, y), lines, ("v1", "v3"), True))
    z = "tensor(mesh, 1, [6, 4, 6], torch.float32, [Shard(0), Shard(0)], True)"
    lines = ("v0 = torch.split(a0, 2, 1)[0]", "v1 = v0.expand([2, 6, 2, 6])", "v2 = F.rms_norm(v0, v0.shape[-1:])")
    check(Program((1, 2), (z,), lines, ("v1", "v2"), True))


def test_a_size_that_a_note_about_strides_would_fix_after_results_were_planned():
    x = "tensor(mesh, 0, [3, 3], torch.float32, [Replicate(), Shard(1)], {grad})"
    lines = (
        "v0 = torch.maximum(a0, a0)",
        "v1 = v0.redistribute(placements=[Replicate(), Shard(0)])",
        "v2 = torch.split(v1, 2, 0)[0]",
    )
    for grad in (False, True):
        check(Program((2, 1), (x.format(grad=grad),), lines, ("v1", "v2"), True))


def test_a_view_of_an_empty_result():
    x = "tensor(mesh, 2, [0, 4], torch.float32, [Shard(1)], True)"
    lines = ("v0 = a0 * 3", "v1 = v0.redistribute(placements=[Shard(0)])", "v2 = v1.transpose(1, 1)")
    check(Program((2,), (x,), lines, ("v2",)))


def test_the_whole_of_an_input_that_was_split_and_a_view_of_it():
    x = "tensor(mesh, 1, [2, 4, 7, 3], torch.float32, [{place}], True)"
    lines = ("v0 = torch.split(a0, 2, 0)[0]", "v1 = v0.reshape([2, 28, 3])")
    for place in ("Replicate()", "Shard(3)"):
        check(Program((2,), (x.format(place=place),), lines, ("v0", "v1")))


def test_a_redistribution_of_uneven_shards_that_backward_alone_needs():
    x = "tensor(mesh, 0, [8, 2, 7], torch.float32, [Shard(0), Shard(1)], True)"
    i = "indices(mesh, 1, [6], 8, [Shard(0), Shard(0)])"
    lines = (
        "v0 = F.embedding(a1, a0.max(1)[0] * 3)",
        "v1 = v0.redistribute(placements=[Shard(1), Shard(0)])",
        "v2 = torch.matmul(v1, v0.transpose(-1, -2))",
    )
    check(Program((2, 1), (x, i), lines, ("v0", "v2")))


@pytest.mark.slow
def test_a_norm_of_uneven_shards_whose_reduction_backward_alone_needs():
    x = "tensor(mesh, 1, [5, 5], torch.float32, [Shard(0)], True)"
    lines = ("v0 = F.rms_norm(a0, a0.shape[-1:])", "v1 = v0 + torch.linalg.vector_norm(a0, dim=0)")
    check(Program((4,), (x,), lines, ("v1",)))


def test_a_reduced_number_that_is_read_by_a_kernel_fused_with_one_of_another_shape():
    x, y = (
        "tensor(mesh, 0, [6, 7, 5], torch.float32, [Shard(1)], False)",
        "tensor(mesh, 1, [8], torch.float32, [Shard(0)], False)",
    )
    lines = ("v0 = a1 @ a1", "v1 = a0.redistribute(placements=[Replicate()])", "v2 = torch.maximum(v1, v0)")
    check(Program((2,), (x, y), lines, ("v1", "v2")), "inductor")


def test_products_over_a_dim_of_which_each_rank_has_one_row():
    x, w = (
        "tensor(mesh, 0, [8, 2], torch.float64, [Shard(1)], True)",
        "tensor(mesh, 1, [3, 2], torch.float64, [Replicate()], False)",
    )
    lines = ("v0 = torch.matmul(a0, a0.transpose(-1, -2))", "v1 = v0.sum()", "v2 = F.linear(a0, a1)")
    check(Program((2,), (x, w), lines, ("v1", "v2")), "inductor")


@pytest.mark.slow
def test_sizes_that_vary_where_some_ranks_get_one_row():
    x = "tensor(mesh, 2, [4, 4], torch.float32, [Shard(0), Shard(0), Partial()], True)"
    lines = (
        "v0 = a0.movedim(1, 0)",
        "v1 = v0.redistribute(placements=[Shard(0), Shard(0), Shard(0)])",
        "v2 = F.gelu(v1 + v1)",
    )
    check(Program((1, 2, 2), (x,), lines, ("v2",), True))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_mask_of_a_dropout_of_shards_that_are_empty_on_some_ranks(dynamic):
    x = "tensor(mesh, 1, [1, 5], torch.float32, [Shard(0), Shard(0)], True)"
    w = "tensor(mesh, 2, [4, 5], torch.float32, [Shard(0), Shard(0)], False)"
    check(Program((2, 2), (x, w), ("v0 = F.dropout(a0, 0.5)", "v1 = F.linear(v0, a1)"), ("v1", "v0"), dynamic))
