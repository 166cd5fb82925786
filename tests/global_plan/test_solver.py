"""Choices for variables with costs of pairs: exact against exhaustion, and bounds that hold."""

import itertools

import numpy as np
import pytest

from dtensor_compile.global_plan.elimination import eliminate
from dtensor_compile.global_plan.message_passing import solve
from dtensor_compile.global_plan.pairwise_problem import IMPOSSIBLE, PairwiseProblem


def random_problem(seed: int, variables: int = 12, most: int = 3) -> PairwiseProblem:
    """A chain, as operators in order are, with a few pairs more, some of which are impossible."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, rng.integers(2, variables + 1))
    n = len(sizes)
    pairs = {}
    for i, j in itertools.combinations(range(n), 2):
        if j == i + 1 or rng.random() < 0.2:
            costs = rng.random((sizes[i], sizes[j]))
            pairs[i, j] = np.where(rng.random(costs.shape) < 0.1, IMPOSSIBLE, costs)
    return PairwiseProblem([rng.random(size) * rng.integers(0, 2) for size in sizes], pairs)


def exhausted(problem: PairwiseProblem) -> float:
    sizes = [len(costs) for costs in problem.own]
    choices = np.indices(sizes).reshape(len(sizes), -1)
    total = sum(costs[x] for costs, x in zip(problem.own, choices))
    return float(min(total + sum(costs[choices[i], choices[j]] for (i, j), costs in problem.pairs.items())))


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_small_problems_are_solved_as_by_exhaustion(seed):
    for problem in map(random_problem, range(seed, seed + 20)):
        found = solve(problem)
        assert found.cost == pytest.approx(exhausted(problem), rel=1e-9)
        assert found.cost == problem.cost(found.choice)
        assert found.bound <= found.cost


def test_bounds_hold_where_the_search_ends_early():
    for problem in map(random_problem, range(40)):
        assert solve(problem, tolerance=0.5, most=2).bound <= exhausted(problem) * (1 + 1e-9)


def test_elimination_refuses_tables_that_are_too_large():
    problem = random_problem(3)
    exact = eliminate(problem)
    assert exact is not None
    assert problem.cost(exact) == pytest.approx(exhausted(problem))
    assert eliminate(problem, most=2) is None


def test_a_long_chain_is_exact():
    rng = np.random.default_rng(0)
    own = [rng.random(20) for _ in range(300)]
    pairs = {(i, i + 1): rng.random((20, 20)) for i in range(299)}
    problem = PairwiseProblem(own, pairs)
    best = own[0]
    for i in range(299):
        best = (best[:, None] + pairs[i, i + 1]).min(axis=0) + own[i + 1]
    found = solve(problem)
    assert found.cost == pytest.approx(best.min())
    assert found.gap < 1e-9


def test_a_problem_without_variables():
    assert solve(PairwiseProblem([], {})).choice == ()
