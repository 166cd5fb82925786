"""Ranks that differ in what they compile: caches that are cold on one rank, recompilations of one rank, a folder that
one rank cannot write, compilers and imports that fail on one rank.

Each job ends with right results, or with an error on every rank that names a rank and the cause.
"""

import contextlib
import re
import time
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from dtensor_compile.lowering.lower import lower_redistributions
from dtensor_compile.runtime import collective_agreement, eager_fallback
from dtensor_compile.stages import lowered
from dtensor_compile.testing import make_mesh, on_ranks
from tests.runtime.broken_package import gather_with_a_package_that_is_broken_on_rank_1
from tests.runtime.jobs import run_job
from tests.stages import with_run

#: Seconds until every rank of a job in which one fails has its error.
BOUND = 30.0


def errors_of(outcomes):
    """The errors of a job in which every rank has to fail in time."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error and "no answer" not in outcome.error, f"rank {rank} of {outcomes}"
        assert outcome.seconds < BOUND, f"rank {rank} of {outcomes}"
    return [outcome.error for outcome in outcomes]


def values_of(outcomes):
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


@contextlib.contextmanager
def lowering_fails_if(condition):
    def lower(graph, *options):
        if condition():
            raise ValueError("nothing to lower it to")
        return lower_redistributions(graph, *options)

    with with_run(lowered, "LOWER", "lower_redistributions", lower):
        yield


# ---- recompilations of one rank ------------------------------------------------------------------------------------


def name_that_changes_on_rank_1(fullgraph, shape, calls=8):
    """A step whose collectives are planned over several mesh dims at once, and an argument that is a constant to Dynamo
    and changes on rank 1 only; returns the largest difference from eager."""
    mesh = make_mesh(shape, ("dp", "tp")[: len(shape)])
    x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0), Shard(1)][: len(shape)])
    whole = [Replicate()] * len(shape)

    def step(x, name):
        return x.sum().redistribute(placements=whole).to_local() + x.full_tensor().sum() + len(name)

    run = torch.compile(step, backend="dtensor_aten", fullgraph=fullgraph)
    expected, worst = step(x, "0"), 0.0
    limit = torch._dynamo.config.patch(recompile_limit=3)
    with limit, unittest.mock.patch.object(eager_fallback, "PATIENCE", 2.0):
        for i in range(calls):
            worst = max(worst, float((run(x, str(i) if dist.get_rank() == 1 else "0") - expected).abs()))
    return worst


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_a_rank_that_reaches_the_recompile_limit_alone_is_an_error_on_every_rank(shape):
    """Eager sends one mesh dim after the other, and in another order than the graph of the other ranks."""
    outcomes = run_job(2 * shape[-1] if shape[1:] else 2, name_that_changes_on_rank_1, False, shape)
    for error in errors_of(outcomes):
        assert re.search(r"rank 1 has compiled step .* as often as Dynamo's recompile limit allows", error), error
    assert "TORCH_LOGS=recompiles" in outcomes[0].error


def test_a_rank_that_reaches_the_recompile_limit_with_fullgraph_is_named_on_the_others():
    other, own = errors_of(run_job(2, name_that_changes_on_rank_1, True, (2,)))
    assert "FailOnRecompileLimitHit" in own
    assert re.search(r"rank 1 could not compile step .* s ago: FailOnRecompileLimitHit", other), other


@on_ranks(2)
def test_ranks_that_reach_the_recompile_limit_together_go_on_in_eager():
    x = distribute_tensor(torch.arange(16.0).view(4, 4), make_mesh((2,)), [Shard(0)])
    rank = dist.get_rank()

    def step(x, name):
        return x.sum().full_tensor() + x.full_tensor().sum() * len(name)

    run = torch.compile(step, backend="dtensor_aten")
    with torch._dynamo.config.patch(recompile_limit=2):
        for i in range(4):
            assert run(x, "n" * (i + 1)) == step(x, "n" * (i + 1))
        begin = time.monotonic()  # a graph of its own for this value, which only rank 1 would find
        assert run(x, "n" if rank else "n" * 9) in (240, 120 * 10)
        assert time.monotonic() - begin < 5


@on_ranks(2)
def test_local_sizes_and_constants_that_change_on_one_rank_are_compiled_by_it_alone():
    x = distribute_tensor(torch.ones(4, 4), make_mesh((2,)), [Shard(0)]).requires_grad_()
    rank = dist.get_rank()

    def step(x, own, name):
        return (x * 2).redistribute(placements=[Replicate()]).to_local().sum() * own.sum() + len(name)

    run = torch.compile(step, backend="dtensor_aten", fullgraph=True)
    with unittest.mock.patch.object(collective_agreement, "PATIENCE", 60.0):
        for i in range(6):
            own, name = torch.ones(1 + i * rank), "n" * (1 + (i * rank) % 3)
            begin = time.monotonic()
            value = run(x, own, name)
            value.backward()
            assert time.monotonic() - begin < 20
            assert value == 32 * len(own) + len(name)


def compiles_again_and_fails_on_rank_1():
    x = distribute_tensor(torch.ones(4, 4), make_mesh((2,)), [Shard(0)])
    run = torch.compile(lambda x, k: x.full_tensor().sum() * k, backend="dtensor_aten", fullgraph=True, dynamic=False)
    fails = False
    with lowering_fails_if(lambda: fails):
        for _ in range(3):
            assert run(x, 1) == 16
        fails = dist.get_rank() == 1
        return run(x, 1 + dist.get_rank())


def test_a_recompilation_that_fails_is_named_where_the_others_lose_the_rank():
    other, own = errors_of(run_job(2, compiles_again_and_fails_on_rank_1))
    assert "ValueError: nothing to lower it to" in own
    assert re.search(r"rank 1 could not compile <lambda> .* s ago: ValueError: nothing to lower it to", other), other


def compiles_again_without_dtensors_and_fails_on_rank_1():
    mesh = make_mesh((2,))

    def step(x, k):
        return torch.distributed._functional_collectives.all_reduce(x, "sum", mesh) * k

    run = torch.compile(step, backend="dtensor_aten", fullgraph=True, dynamic=False)
    fails = False
    with lowering_fails_if(lambda: fails):
        assert run(torch.ones(3), 1).sum() == 6
        fails = dist.get_rank() == 1
        return run(torch.ones(3), 1 + dist.get_rank())


def test_so_is_one_of_a_graph_over_plain_tensors():
    other, own = errors_of(run_job(2, compiles_again_without_dtensors_and_fails_on_rank_1))
    assert "ValueError" in own and "rank 1 could not compile step" in other


def test_an_error_of_another_function_is_named_by_a_rank_that_waits_in_its_backward():
    with_failure = run_job(2, fails_before_its_backward)
    other, own = errors_of(with_failure)
    assert "ValueError" in own and "rank 1 could not compile <lambda>" in other


def fails_before_its_backward():
    x = distribute_tensor(torch.ones(4, 4), make_mesh((2,)), [Shard(0)]).requires_grad_()
    run = torch.compile(
        lambda x: x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).square().sum(),
        backend="dtensor_aten",
    )
    run(x).backward()
    value = run(x)
    if dist.get_rank() == 1:
        with lowering_fails_if(lambda: True):
            torch.compile(lambda x: x * 2, backend="dtensor_aten")(x)
    value.backward()


# ---- imports -------------------------------------------------------------------------------------------------------


def test_an_import_that_fails_on_one_rank_is_named_on_the_others():
    other, own = errors_of(run_job(2, gather_with_a_package_that_is_broken_on_rank_1, imports=True))
    assert "ImportError: this installation has no planner" in own
    assert re.search(r"rank 1 could not import the backend .* s ago: ImportError: this installation has no", other), (
        other
    )
    assert "rank 1 has said nothing of them" in other and "it has not begun to compile" in other
