"""Every pair of specs: right on real numbers, the bytes that the plan says, and the fewest of all paths.

A sample of the pairs; ``make test-redistributions`` runs all of them.
"""

import itertools
import os
import random

import pytest

from dtensor_compile.compat.dtensor.specs import Partial
from dtensor_compile.errors import PlanError
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.planner.problem import Problem
from dtensor_compile.planner.search import bytes_sent, cheapest_plan, collectives
from dtensor_compile.planner.shard_intervals import CUTS
from dtensor_compile.planner.steps import legal_steps
from dtensor_compile.planner.torch_greedy import torch_steps
from dtensor_compile.topology.network import Network
from tests.cases import mostly_slow
from tests.ops.simulated import wrong_plans

#: Share of the pairs that are tried.
ALL = os.environ.get("DTENSOR_COMPILE_ALL_PAIRS") == "1"

WORDS = ("R", "S(0)", "S(1)", "P(sum)")


def pairs(mesh_ndim, words, most, seed=0):
    specs = ["".join(spec) for spec in itertools.product(words, repeat=mesh_ndim)]
    every = [pair for pair in itertools.product(specs, specs) if pair[0] != pair[1]]
    return every if ALL or len(every) <= most else random.Random(seed).sample(every, most)


def legal(cases, mesh_shape):
    for source, target, shape in cases:
        try:
            cheapest_plan(source, target, mesh_shape, shape)
        except PlanError:
            continue
        yield source, target, shape


#: Mesh shape, words, global shapes.
MATRIX = [
    ((2,), (*WORDS, "P(max)", "_S(0,2)", "_S(1,3)"), [(8, 8), (5, 3), (1, 2), (0, 4)]),
    ((4,), WORDS, [(8, 8), (5, 3), (1, 2)]),
    ((6,), WORDS, [(12, 8), (7, 13)]),
    ((2, 2), (*WORDS, "_S(0,2)"), [(8, 8), (5, 6), (1, 3), (0, 4)]),
    ((2, 4), WORDS, [(16, 8), (7, 5), (4, 3)]),
    ((3, 2), WORDS, [(12, 12), (7, 5)]),
    ((2, 1, 2), WORDS, [(8, 8)]),
    ((2, 2, 2), WORDS, [(8, 8), (7, 9)]),
    ((2, 2, 2), (*WORDS, "S(2)"), [(8, 4, 8), (5, 6, 3)]),
]


@pytest.mark.parametrize(
    "mesh_shape, words, shapes",
    MATRIX if ALL else mostly_slow(MATRIX, *MATRIX[:4]),
    ids=str,
)
def test_values_and_bytes(mesh_shape, words, shapes):
    for shape in shapes:
        cases = [(*pair, shape) for pair in pairs(len(mesh_shape), words, 60)]
        wrong = wrong_plans(mesh_shape, list(legal(cases, mesh_shape)))
        assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("ranks", [(0, 2, 1, 3), (1, 5, 3, 7)])
def test_meshes_whose_ranks_are_in_another_order(ranks):
    cases = [(*pair, shape) for pair in pairs(2, WORDS, 40) for shape in [(8, 8), (5, 6)]]
    assert wrong_plans((2, 2), list(legal(cases, (2, 2))), ranks=ranks) == []


def cheapest_of_all(problem, states):
    """Fewest elements of any path with at most as many collectives as torch's: every step to every state is tried.

    But where torch makes the terms of a sum of a replicated tensor, which are v/n, they are not made of shards with
    zeros around them: the program sees its terms.
    """
    theirs = torch_steps(problem)
    limit = 4 if theirs is None else collectives(theirs)
    edges = {}

    def steps_from(state):
        if state not in edges:
            best = {}
            for goal in states:
                towards = Problem(
                    state, goal, problem.mesh_shape, problem.shape, problem.divisors, problem.itemsize, problem.network
                )
                for step in legal_steps(towards, state):
                    if step.kind == "spread" and type(problem.start[step.mesh_dims[0]]) not in CUTS:
                        continue
                    key = step.after, int(step.sends)
                    best[key] = min(best.get(key, step.elements), step.elements)
            edges[state] = best
        return edges[state]

    best = {(problem.start, 0): 0}
    waiting = [(problem.start, 0)]
    while waiting:
        state, count = waiting.pop()
        for (after, sends), elements in steps_from(state).items():
            key = after, count + sends
            total = best[state, count] + elements
            if key[1] <= limit and total < best.get(key, total + 1):
                best[key] = total
                waiting.append(key)
    return min(total for (state, _), total in best.items() if state == problem.goal)


def plans_and_best(mesh_shape, words, shape, most):
    """Pairs of specs, and the plan, and the fewest elements of any path."""
    states = [parse_spec("".join(spec)) for spec in itertools.product(words, repeat=len(mesh_shape))]
    for source, target in pairs(len(mesh_shape), words, most):
        try:
            steps = cheapest_plan(source, target, mesh_shape, shape)
        except PlanError:
            continue
        problem = Problem(parse_spec(source), parse_spec(target), mesh_shape, shape, shape, 4, Network())
        if any(isinstance(b, Partial) and type(a) in CUTS for a, b in zip(problem.start, problem.goal)):
            continue  # torch refuses to make a shard partial, so that nobody asks for it
        assert spec_text(steps[-1].after if steps else problem.start) == target
        yield (
            f"{source}->{target}: {[str(step) for step in steps]}",
            bytes_sent(steps, 1),
            cheapest_of_all(problem, states),
        )


def test_a_way_over_another_spec_has_to_save_more_than_a_row():
    """Uneven over two mesh dims: over another spec the busiest rank sends less. Not worth it where it saves a
    thousandth.
    """

    def texts(columns):
        return [str(step) for step in cheapest_plan("RP(sum)", "RS(1)", (2, 4), (8, columns))]

    assert texts(5) == ["slice[0] R->S(0)", "exchange[0,1] S(0)P(sum)->RS(1)"]
    assert texts(5001) == ["reduce_scatter[1] P(sum)->S(1)"]


@pytest.mark.parametrize(
    "mesh_shape, words, shape, most",
    [
        *(((2,), WORDS, (8, 8), 99), ((4,), WORDS, (5, 3), 99), ((2, 2), WORDS, (8, 8), 8)),
        *(((2, 4), WORDS, (16, 8), 6), ((2, 2), WORDS, (5, 6), 30)),
        *(((2, 4), WORDS, (7, 5), 20), ((3, 2), WORDS, (7, 5), 10)),
    ],
    ids=str,
)
def test_no_path_sends_less(mesh_shape, words, shape, most):
    for text, sent, best in plans_and_best(mesh_shape, words, shape, most):
        assert sent == best, f"{text}, best {best}"
