"""Ranges of sizes for which a plan is the cheapest: against plans made for each size; costs in symbols: against costs
of numbers.
"""

import itertools
import random

import pytest
import sympy
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtensor_compile
from dtensor_compile.compat.aot.shapes import Symbol
from dtensor_compile.errors import PlanError
from dtensor_compile.lowering.size_ranges import MARGIN, Range, cheapest_range, symbolic
from dtensor_compile.planner.problem import Problem
from dtensor_compile.planner.search import bytes_sent, plan, problem_between
from dtensor_compile.testing import make_mesh, run_on_ranks
from dtensor_compile.topology import Link
from dtensor_compile.topology.network import Network

S = sympy.Symbol("s0", integer=True, positive=True)
SPECS = ["".join(words) for words in itertools.product(("R", "S(0)", "S(1)", "P(sum)"), repeat=2)]
FAST, SLOW = Link(3e-6, 4e11), Link(1e-4, 1e9)
NETWORKS = {
    "alike": Network(),
    "slow outside": Network((SLOW, FAST)),
    "slow inside": Network((FAST, SLOW)),
    "gloo": Network((SLOW, SLOW), "gloo"),
    "far and wide": Network((Link(1e-3, 1e11), Link(1e-6, 1e8))),
}


def cost(steps, mesh_shape, shape, divisors, network):
    """Bytes and seconds of steps at a size, whatever size they were found for."""
    priced = [
        Problem(s.before, s.after, mesh_shape, shape, divisors, 4, network).step(s.kind, s.mesh_dims, s.before, s.after)
        for s in steps
    ]
    return bytes_sent(priced, 4), sum(step.seconds for step in priced)


def programs(network, seed, count=60):
    """Specs, mesh shape, hint of the symbol, and what a size of ``factor * s0`` is a multiple of."""
    draw = random.Random(f"{network}{seed}")
    for source, target in draw.sample(list(itertools.product(SPECS, SPECS)), count):
        mesh_shape = draw.choice([(2, 2), (2, 8), (4, 2)])
        yield draw, source, target, mesh_shape, draw.choice([2, 16, 300, 5000, 10**5])


def planned(source, target, mesh_shape, shape, network, divisors):
    try:
        return plan(source, target, mesh_shape, shape, 4, network=network, divisors=divisors)
    except PlanError:
        return ()


@pytest.mark.parametrize("even", [True, False], ids=["even", "any size"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_plan_is_cheaper_in_the_range_and_one_is_beside_it(name, even):
    network, looked_at, finite = NETWORKS[name], 0, 0
    for draw, source, target, mesh_shape, hint in programs(name, even):
        ranks = mesh_shape[0] * mesh_shape[1]
        factor = ranks if even else 1
        divisors = (factor, 64)
        steps = planned(source, target, mesh_shape, (factor * hint, 64), network, divisors)
        if not any(step.sends for step in steps):
            continue
        symbol = Symbol(S, hint, 2, None)
        at_hint = problem_between(source, target, mesh_shape, (factor * hint, 64), divisors, network=network)
        found = cheapest_range(at_hint, ((factor, 0), (0, 64)), symbol, steps)
        if found is None:
            assert not even, (source, target, mesh_shape, hint, [str(s) for s in steps])
            continue
        looked_at, finite = looked_at + 1, finite + (found.high is not None)
        ends = [end + k * found.step for end in (found.low, found.high or 10**6) for k in (-1, 0, 1)]
        for value in {*ends, *(draw.randint(2, most) // found.step * found.step for most in (200, 10**4, 10**6))}:
            if value < 2:
                continue
            shape = (factor * value, 64)
            best = cost(
                planned(source, target, mesh_shape, shape, network, divisors), mesh_shape, shape, divisors, network
            )
            mine = cost(steps, mesh_shape, shape, divisors, network)
            cheapest = mine[0] == best[0] if network.uniform else mine[1] * (1 - 2 * MARGIN) <= best[1]
            assert cheapest == (value in found), (source, target, mesh_shape, hint, found, value, mine, best)
    assert looked_at > 20 and (finite == 0 or not network.uniform)


@pytest.mark.parametrize("hint, wanted, kinds", [
    (16, Range(2, 549, 1), ["slice", "all_gather", "slice"]),
    (10**5, Range(550, None, 1), ["slice", "all_to_all"]),
])  # fmt: skip
def test_latency_decides_for_small_sizes_and_bandwidth_for_large_ones(hint, wanted, kinds):
    network, divisors = NETWORKS["slow outside"], (16, 64)
    steps = plan("RS(0)", "S(1)S(1)", (2, 8), (16 * hint, 64), network=network, divisors=divisors)
    symbol = Symbol(S, hint, 2, None)
    at_hint = problem_between("RS(0)", "S(1)S(1)", (2, 8), (16 * hint, 64), divisors, network=network)
    found = cheapest_range(at_hint, ((16, 0), (0, 64)), symbol, steps)
    assert found == wanted and [step.kind for step in steps] == kinds


@pytest.mark.parametrize("name", NETWORKS)
def test_symbolic_cost_is_that_of_numbers(name):
    network = NETWORKS[name]
    for draw, source, target, mesh_shape, hint in programs(name, "cost", 30):
        for factor in (mesh_shape[0] * mesh_shape[1], 1):
            divisors = (factor, 64)
            steps = planned(source, target, mesh_shape, (factor * hint, 64), network, divisors)
            found = symbolic(steps, mesh_shape, (factor * S, 64), network=network)
            for value in (2, 3, 7, hint, draw.randint(2, 10**6)):
                sent, seconds = cost(steps, mesh_shape, (factor * value, 64), divisors, network)
                assert found.bytes.subs(S, value) == sent
                assert float(found.seconds.subs(S, value)) == pytest.approx(seconds, rel=1e-12)


def test_even_sizes_have_plain_expressions():
    def sent(source, target, factor):
        steps = plan(source, target, (4,), (factor * 6, 8), divisors=(factor, 8))
        return str(symbolic(steps, (4,), (factor * S, 8)).bytes)

    assert [sent("S(0)", "R", 4), sent("P(sum)", "S(0)", 8), sent("P(sum)", "R", 4)] == ["96*s0", "192*s0", "192*s0"]
    assert sent("S(0)", "R", 1) == "96*ceiling(s0/4)"


def test_a_plan_that_is_not_the_cheapest_has_no_range():
    network, divisors = NETWORKS["slow outside"], (16, 64)
    small = plan("RS(0)", "S(1)S(1)", (2, 8), (32, 64), network=network, divisors=divisors)
    line, symbol = ((16, 0), (0, 64)), Symbol(S, 10**5, 2, None)
    at_hint = problem_between("RS(0)", "S(1)S(1)", (2, 8), (16 * 10**5, 64), divisors, network=network)
    assert cheapest_range(at_hint, line, symbol, small) is None


def test_text_and_membership():
    assert Range(4, 64, 4).text("s0") == "4 <= s0 <= 64 in steps of 4" and Range(2, None, 1).text("s1") == "s1 >= 2"
    assert [value in Range(4, 12, 4) for value in (0, 4, 6, 12, 16)] == [False, True, False, True, False]
    assert 10**9 in Range(2, None, 1)


def told(topology):
    """Decisions about plans, and what the report says, of a program whose batch varies."""
    mesh = make_mesh((2, 2), ("dp", "tp"))
    options = {"topology": topology} if topology else {}

    @torch.compile(backend="dtensor_aten", fullgraph=True, options=options)
    def gathered(x):
        return (x * 2).redistribute(placements=[Replicate(), Shard(1)]) * 2

    with dtensor_compile.record() as recording:
        for batch in (8, 12, 16):
            x = distribute_tensor(torch.ones(batch, 8), mesh, [Shard(0), Shard(1)])
            assert torch.equal(gathered(x).full_tensor(), torch.full((batch, 8), 4.0))
    decisions = [(d.before, d.after, d.reason) for d in recording.decisions if d.kind == "plan"]
    rows = recording.report().ours.redistributions
    return decisions, [row.cheapest_for for row in rows]


@pytest.mark.parametrize("topology, measure", [(None, "fewest bytes"), ("cpu-1gbit", "cheapest")])
def test_decision_and_report_tell_the_range(topology, measure):
    first, *others = run_on_ranks(4, told, topology)
    assert all(other == first for other in others)
    decisions, rows = first
    assert [decision[:2] for decision in decisions] == [("S(0)S(1)->RS(1)", "all_gather[dp] S(0)->R")]
    assert rows == [decisions[0][2]] and rows[0].startswith(f"{measure} for s") and " >= 4 in steps of 4" in rows[0]


def fixed():
    mesh = make_mesh((2,), ("tp",))
    with dtensor_compile.record() as recording:
        compiled = torch.compile(
            lambda x: x.redistribute(placements=[Replicate()]) * 2, backend="dtensor_aten", fullgraph=True
        )
        compiled(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    return [d.kind for d in recording.decisions if d.kind == "plan"], [
        r.cheapest_for for r in recording.report().ours.redistributions
    ]


def test_fixed_sizes_have_no_range():
    assert run_on_ranks(2, fixed) == [([], [""])] * 2
