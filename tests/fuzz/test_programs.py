"""Random programs with fixed seeds: compiled equals eager, with all passes and with one alone. ``make fuzz`` is the long run."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtensor_compile.compat.fake_group import simulated_job
from dtensor_compile.testing import make_mesh, run_on_ranks
from dtensor_compile.testing.bisect import pass_names
from dtensor_compile.testing.parity import Settings
from tests.fuzz.programs import Program, make_program, smaller, verdict

TWO = [(2,), (2, 1), (1, 2)]


def made(draw, meshes, lines=6):
    try:
        with simulated_job(4, 0):
            return make_program(draw, meshes, lines)
    finally:
        make_mesh.cache_clear()  # those meshes have gone with their job


def check(program):
    """Fails with the program where it differs on the ranks."""
    alone = [f"{name} alone" for name in pass_names(Settings())]
    variants = ["all", alone[len(program.source) % len(alone)]]
    result, found = run_on_ranks(program.world, verdict, program, variants, timeout=280)[0]
    assert result != "differs", f"{program}\n" + "\n".join(found)


# ---- the fuzzer itself -----------------------------------------------------------------------------------------------------


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


def test_smaller_programs_have_one_part_less():
    program = Program((2,), ("x",), ("v0 = a0 + 1", "v1 = v0 * 2", "v2 = a0 * 3"), ("v1", "v2"), True)
    small = list(smaller(program))
    assert {p.lines for p in small} == {program.lines, program.lines[:2], ("v0 = a0 + 1", "v2 = a0 * 3")}
    assert {p.outputs for p in small} == {("v1",), ("v2",), ("v1", "v2")} and small[-1].dynamic is None


@settings(max_examples=12, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_programs_on_two_ranks(draw):
    program = made(draw, TWO)
    if program is not None:
        check(program)


@pytest.mark.parametrize("seed", range(4))
def test_programs_on_four_ranks(seed):
    program = made(random.Random(seed), [(4,), (2, 2), (1, 2, 2)], lines=4)
    assert program is not None
    check(program)


# ---- found by the fuzzer ---------------------------------------------------------------------------------------------------


def test_the_square_of_a_symbolic_size_in_a_stride():
    x = "tensor(mesh, 0, [6, 3], torch.float32, [Replicate()], True)"
    check(Program((2,), (x,), ("v0 = torch.matmul(a0, a0.transpose(-1, -2))", "v1 = v0.unsqueeze(0)"), ("v1",), True))
