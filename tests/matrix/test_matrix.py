"""A sample of the matrix; ``make matrix`` is all of it."""

import pytest

from dtensor_compile.compat.distributed.rank_threads import run_in_threads
from dtensor_compile.testing.parity import Settings
from tests.fuzz.programs import case_of_program
from tests.matrix import programs
from tests.matrix.programs import MESHES, OPERATORS, PAIRS, check, make_program, pairs


def test_there_are_twenty_operators_fifty_pairs_and_three_meshes():
    assert (len(OPERATORS), PAIRS, len(MESHES)) == (20, 50, 3)
    assert all(len(set(pairs(dims))) == PAIRS for dims in (1, 2))


SAMPLE = [
    ("linear", (2,), [1, 7, 40]),
    ("narrow", (3,), [2, 9]),
    pytest.param("linear", (2, 2), [1], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("operator", "mesh", "which"), SAMPLE)
def test_a_sample(operator, mesh, which):
    outcome = check(operator, mesh, which)
    assert not outcome.wrong and outcome.equal + outcome.refused == which and outcome.equal


@pytest.mark.slow
@pytest.mark.parametrize("number", [9, 19])
def test_gradients_of_a_strided_shard_that_is_a_sum_are_placed_as_in_eager(number):
    """AOTAutograd took the strided shard of such a gradient for an order of shards, and the sum of two of them was
    replicated.
    """
    assert check("flatten", (2, 2), [number]).equal == [number]


@pytest.mark.slow
def test_layouts_that_eager_has_not_met_before_are_found_while_tracing():
    """torch reads the size of a strided shard, which it looks at on the way, out of a tensor that has no values while
    tracing.
    """
    case = case_of_program(make_program("linear", (2, 2), [1]), calls=1)
    run_in_threads(4, lambda rank: case.run(Settings(options={"kernels": "aten"})))


def test_what_is_wrong_is_found_in_its_pair(monkeypatch):
    factor = "(2 if torch.compiler.is_compiling() and {x}.placements[0].is_shard(2) else 1)"
    monkeypatch.setitem(programs.OPERATORS, "add", f"{{x}} * {factor} + {{y}}")
    first = [x for x, _ in pairs(1)]
    which = [first.index("[Shard(0)]"), first.index("[Shard(2)]")]
    outcome = check("add", (2,), which)
    assert (
        outcome.equal == which[:1]
        and list(outcome.wrong) == which[1:]
        and "rank 0: output" in outcome.wrong[which[1]][0]
    )


def test_what_eager_refuses_is_no_difference():
    assert check("flatten", (3,), [0, 18]).refused == [0] and "flatten" in make_program("flatten", (3,), [0]).source
