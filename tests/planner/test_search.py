"""Plans: legal on the way, right at the end, never more bytes or more collectives than stock torch, errors that say
why.
"""

import concurrent.futures
import itertools
import math
import multiprocessing
import random

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from dtensor_compile.errors import PlanError
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.planner import search as plan_module
from dtensor_compile.planner.search import bytes_sent, cheapest_plan, collectives
from dtensor_compile.topology import Link
from dtensor_compile.topology.network import Network

WORDS = ("R", "S(0)", "S(1)", "P(sum)")


def pairs(mesh_ndim, words=WORDS):
    specs = ["".join(spec) for spec in itertools.product(words, repeat=mesh_ndim)]
    return list(itertools.product(specs, specs))


def sample(pairs, n):
    return random.Random(0).sample(pairs, n)


#: Mesh shape, global shape, item size, pairs of specs.
CASES = [
    ((2,), (8, 8), 4, pairs(1)),
    ((4,), (8, 8), 4, pairs(1)),
    ((4,), (3, 1), 4, pairs(1)),
    ((4,), (4096, 4096), 2, pairs(1)),
    ((2, 2), (8, 8), 4, pairs(2)),
    ((2, 2), (5, 6), 4, pairs(2)),
    ((2, 2), (1, 4096), 2, pairs(2)),
    ((2, 2), (4096, 4096), 2, pairs(2)),
    ((2, 4), (256, 64), 4, pairs(2)),
    ((4, 2), (256, 64), 4, pairs(2)),
    ((2, 2), (64, 32, 16), 4, pairs(2, (*WORDS, "S(2)"))),
    ((1, 4), (64, 64), 4, pairs(2)),
    ((2, 2, 2), (64, 64), 4, sample(pairs(3), 900)),
    ((2, 2, 2), (4096, 4096, 8), 4, sample(pairs(3, (*WORDS, "S(2)")), 900)),
    ((2, 4, 2), (7, 300), 4, sample(pairs(3), 300)),
]  # fmt: skip

#: What `make test-slow` searches.
SLOW = (
    ((2, 2), (1, 4096)),
    ((2, 2), (64, 32, 16)),
    ((2, 2, 2), (64, 64)),
    ((2, 2, 2), (4096, 4096, 8)),
    ((2, 4, 2), (7, 300)),
)


def sent(kind, n, elements):
    """Elements that one rank sends in a collective of `n` ranks on an input of `elements` (ring algorithms)."""
    return {
        "all_reduce": 2 * (n - 1) * elements // n,
        "reduce_scatter": (n - 1) * elements // n,
        "all_to_all": (n - 1) * elements // n,
        "all_gather": (n - 1) * elements,
        "nothing": 0,
    }[kind]


def price(state, mesh_shape, shape, mesh_dim, target, all_to_all):
    """Kind of collective and elements sent where `mesh_dim` of `state` changes to `target`, padding included."""
    source, n = state[mesh_dim], mesh_shape[mesh_dim]
    sizes = list(shape)
    for p, size in zip(state, mesh_shape):
        if isinstance(p, Shard):
            sizes[p.dim] = math.ceil(sizes[p.dim] / size)
    if isinstance(source, Replicate):
        return "nothing", 0
    if isinstance(target, Shard):
        sizes[target.dim] = math.ceil(sizes[target.dim] / n) * n  # what is scattered is padded
    if isinstance(source, Partial):
        kind = "reduce_scatter" if isinstance(target, Shard) else "all_reduce"
    elif isinstance(target, Shard):
        kind = "all_to_all" if all_to_all else "all_gather"
    else:
        kind = "all_gather"
    return kind, sent(kind, n, math.prod(sizes))


def stock_prices(cases):
    """For each pair of each case: (collectives, elements) of stock torch with all_to_all and without; None where it
    refuses.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dtensor_compile.compat.dtensor.specs import make_spec

    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    answers = []
    for mesh_shape, shape, _, pairs_ in cases:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=math.prod(mesh_shape), store=FakeStore())
        mesh = init_device_mesh("cpu", mesh_shape)
        for source, target in pairs_:
            state = list(parse_spec(source))
            specs = [make_spec(mesh, parse_spec(text), shape, __import__("torch").float32) for text in (source, target)]
            totals = {True: [0, 0], False: [0, 0]}
            try:
                infos = _gen_transform_infos_non_cached(*specs)
            except (RuntimeError, NotImplementedError):
                infos = None
            for info in infos or ():
                before, after = info.src_dst_placements
                if not isinstance(before, Replicate) and (isinstance(after, Partial)):
                    infos = None
                    break
                if mesh_shape[info.mesh_dim] > 1:
                    for all_to_all, total in totals.items():
                        kind, elements = price(state, mesh_shape, shape, info.mesh_dim, after, all_to_all)
                        total[0] += kind != "nothing"
                        total[1] += elements
                state[info.mesh_dim] = after
            answers.append(None if infos is None else {k: tuple(v) for k, v in totals.items()})
    return answers


@pytest.fixture(scope="module")
def stock():
    """(mesh shape, shape, source, target) -> what stock torch sends."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        answers = iter(pool.submit(stock_prices, CASES).result())
    return {(m, s, source, target): next(answers) for m, s, _, pairs_ in CASES for source, target in pairs_}


def case_id(case):
    return f"{case[0]}-{case[1]}".replace(" ", "")


of_cases = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case[:2] in SLOW else case for case in CASES],
    ids=case_id,
)


@of_cases
def test_never_more_bytes_or_collectives_than_stock(case, stock):
    mesh_shape, shape, itemsize, pairs_ = case
    worse = []
    for source, target in pairs_:
        theirs = stock[mesh_shape, shape, source, target]
        if theirs is None:
            continue
        steps = cheapest_plan(source, target, mesh_shape, shape, itemsize)
        ours = collectives(steps), bytes_sent(steps, itemsize)
        for limit in theirs.values():
            if ours[0] > limit[0] or ours[1] > limit[1] * itemsize:
                worse.append(
                    f"{source}->{target}: {ours} against {limit[0], limit[1] * itemsize}: {[str(s) for s in steps]}"
                )
    assert not worse, f"{len(worse)} of {len(pairs_)}:\n" + "\n".join(worse[:20])


@of_cases
def test_plan_exists_wherever_stock_has_one(case, stock):
    mesh_shape, shape, itemsize, pairs_ = case
    for source, target in pairs_:
        try:
            cheapest_plan(source, target, mesh_shape, shape, itemsize)
        except PlanError:
            assert stock[mesh_shape, shape, source, target] is None, f"{source}->{target}"


@of_cases
def test_one_collective_of_one_mesh_dim_counts_what_it_sends(case):
    mesh_shape, shape, itemsize, pairs_ = case
    for source, target in pairs_:
        try:
            steps = cheapest_plan(source, target, mesh_shape, shape, itemsize)
        except PlanError:
            continue
        for step in steps:
            if (
                len(step.changed) == 1
                and step.sends
                and step.kind != "exchange"
                and "_S" not in spec_text(step.before + step.after)
            ):
                (i,) = step.mesh_dims
                kind, elements = price(step.before, mesh_shape, shape, i, step.after[i], all_to_all=True)
                assert (kind, step.elements) == (step.kind, elements), (source, target, str(step))


@of_cases
def test_steps_lead_from_source_to_target(case):
    mesh_shape, shape, itemsize, pairs_ = case

    def trivial(text):
        return tuple(Replicate() if n == 1 else p for p, n in zip(parse_spec(text), mesh_shape))

    for source, target in pairs_:
        try:
            steps = cheapest_plan(source, target, mesh_shape, shape, itemsize)
        except PlanError:
            continue
        state = trivial(source)
        for step in steps:
            assert step.before == state and step.changed and all(mesh_shape[i] > 1 for i in step.mesh_dims)
            state = step.after
        assert state == trivial(target), f"{source}->{target}"


@pytest.mark.parametrize("spec", ["R", "S(0)", "S(1)R", "P(sum)P(sum)S(0)"])
def test_same_spec_needs_nothing(spec):
    assert cheapest_plan(spec, spec, (2,) * len(parse_spec(spec)), (8, 8)) == ()


def test_mesh_dims_of_size_one_need_nothing():
    assert cheapest_plan("S(0)P(sum)", "RS(1)", (1, 1), (8, 8)) == ()
    assert [step.mesh_dims for step in cheapest_plan("S(0)S(1)", "RR", (1, 2), (8, 8))] == [(1,)]


def texts(*args, **kwargs):
    return [str(step) for step in cheapest_plan(*args, **kwargs)]


def test_strided_shards():
    assert texts("RR", "_S(0,2)S(0)", (2, 2), (8, 8)) == ["slice[0,1] RR->_S(0,2)S(0)"]
    assert cheapest_plan("_S(0,2)S(0)", "_S(0,2)S(0)", (2, 2), (8, 8)) == ()
    assert collectives(cheapest_plan("_S(0,2)S(1)", "_S(0,2)R", (2, 2), (8, 8))) == 1
    assert texts("S(0)S(0)", "_S(0,2)S(0)", (2, 2), (8, 8)) == ["exchange[0,1] S(0)->_S(0,2)"]
    assert collectives(cheapest_plan("_S(0,2)S(0)", "RR", (2, 2), (8, 8))) == 1


def test_several_mesh_dims_at_once():
    assert texts("S(0)S(1)", "RR", (2, 4), (16, 8)) == ["all_gather[0,1] S(0)S(1)->RR"]
    assert texts("S(0)RS(0)", "RRR", (2, 4, 2), (16, 8)) == ["all_gather[0,2] S(0)S(0)->RR"]
    assert texts("P(sum)P(sum)", "RR", (2, 4), (16, 8)) == ["all_reduce[0,1] P(sum)P(sum)->RR"]
    assert texts("P(sum)P(sum)", "S(1)S(0)", (2, 4), (16, 8)) == ["reduce_scatter[0,1] P(sum)P(sum)->S(1)S(0)"]
    assert texts("S(0)S(0)", "S(1)S(1)", (2, 2), (16, 8)) == ["exchange[0,1] S(0)S(0)->S(1)S(1)"]
    assert texts("P(sum)S(0)", "S(0)S(1)", (2, 2), (16, 8)) == ["exchange[0,1] P(sum)S(0)->S(0)S(1)"]


def test_what_the_goal_slices_away_is_not_reduced():
    assert texts("P(sum)R", "S(0)S(0)", (2, 2), (16, 8)) == ["reduce_scatter[0] P(sum)R->S(0)S(0)"]
    assert bytes_sent(cheapest_plan("P(sum)R", "S(0)S(0)", (2, 2), (16, 8)), 4) == 16 * 8 * 4 // 4


def test_shard_becomes_a_term_of_a_sum_without_a_message():
    assert texts("S(0)", "P(sum)", (2,), (8, 8)) == ["spread[0] S(0)->P(sum)"]
    assert texts("S(0)", "P(max)", (2,), (8, 8)) == ["all_gather[0] S(0)->R", "partition[0] R->P(max)"]


def test_symbolic_sizes_take_steps_that_are_right_for_all():
    assert texts("S(0)S(1)", "S(1)S(0)", (2, 2), (8, 8)) == ["exchange[0,1] S(0)S(1)->S(1)S(0)"]
    for step in cheapest_plan("S(0)S(1)", "S(1)S(0)", (2, 2), (8, 8), divisors=(1, 8)):
        assert step.kind != "exchange" and len(step.mesh_dims) == 1
    assert texts("S(0)S(0)", "RR", (2, 2), (8, 8), divisors=(4, 8)) == ["all_gather[0,1] S(0)S(0)->RR"]
    assert len(cheapest_plan("S(0)S(0)", "RR", (2, 2), (8, 8), divisors=(2, 8))) == 2
    assert texts("S(1)S(2)", "S(2)S(1)", (2, 2), (5, 8, 8), divisors=(1, 8, 8)) == ["exchange[0,1] S(1)S(2)->S(2)S(1)"]


def test_topology_weighs_mesh_dims():
    slow, fast = Link(1e-5, 1e8), Link(1e-6, 1e11)
    # With equal links one gather does; over a slow and a fast link it would send everything over the slow one.
    assert len(cheapest_plan("S(0)S(0)", "RR", (2, 8), (4096, 4096))) == 1
    assert len(cheapest_plan("S(0)S(0)", "RR", (2, 8), (4096, 4096), network=Network((slow, fast)))) == 2


def test_planning_a_mesh_of_six_dims_looks_at_few_of_the_steps(monkeypatch):
    """Of 5^6 layouts, each with steps to others, the search sees the way to the target: at most 297 steps here."""
    specs, counts = random.Random(1), []

    def counted(*args, **kwargs):
        for step in legal_steps(*args, **kwargs):
            counts[-1] += 1
            yield step

    legal_steps = plan_module.legal_steps
    monkeypatch.setattr(plan_module, "legal_steps", counted)
    for _ in range(12):
        source, target = (
            "".join(specs.choices(("R", "S(0)", "S(1)", "S(2)", "P(sum)")[: 4 if k else 5], k=6)) for k in (0, 1)
        )
        counts.append(0)
        cheapest_plan(source, target, (2,) * 6, (64, 64, 64))
    assert min(counts) > 0 and max(counts) < 600, counts


@pytest.mark.parametrize(
    ("source", "target", "mesh_shape", "message"),
    [
        ("S(2)", "R", (2,), r"S\(2\) in spec S\(2\): the tensor has 2 dims"),
        ("R", "S(2)", (2,), r"S\(2\) in spec S\(2\): the tensor has 2 dims"),
        ("R", "_S(2,2)", (2,), r"_S\(2,2\) in spec _S\(2,2\): the tensor has 2 dims"),
        ("R", "RR", (2,), r"spec RR has 2 placements, but the mesh has 1 dims"),
        ("R", "RR", (2, 2), r"spec R has 1 placements, but the mesh has 2 dims"),
        ("P(sum)", "P(max)", (2,), r"nothing leads from P\(sum\) to P\(max\)"),
        ("R", "P(product)", (2,), r"nothing leads from R to P\(product\)"),
        ("P(sum)S(0)", "P(max)S(0)", (2, 2), r"nothing leads from P\(sum\) to P\(max\)"),
        ("P(sum)P(max)", "RR", (2, 2), r"spec P\(sum\)P\(max\) mixes reductions whose order matters"),
        ("RR", "P(min)P(sum)", (2, 2), r"spec P\(min\)P\(sum\) mixes reductions"),
        ("X", "R", (2,), r"does not parse"),
    ],
)
def test_impossible_change_is_an_error_that_says_why(source, target, mesh_shape, message):
    with pytest.raises((PlanError, ValueError), match=message):
        cheapest_plan(source, target, mesh_shape, (8, 8))


def test_plan_of_symmetric_choices_is_the_same_each_time():
    from dtensor_compile.planner.search import _plan

    first = [cheapest_plan(s, t, (2, 2), (64, 64)) for s, t in pairs(2) if "P" not in t]
    _plan.cache_clear()
    assert first == [cheapest_plan(s, t, (2, 2), (64, 64)) for s, t in pairs(2) if "P" not in t]
