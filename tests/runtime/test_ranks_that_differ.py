"""Ranks that differ in what they compile: caches that are cold on one rank, recompilations of one rank, a folder that
one rank cannot write, compilers and imports that fail on one rank.

Each job ends with right results, or with an error on every rank that names a rank and the cause.
"""

import contextlib
import datetime
import functools
import math
import re
import shutil
import subprocess
import time
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from dtensor_compile.compat.dynamo import counters
from dtensor_compile.lowering.lower import lower_redistributions
from dtensor_compile.runtime import collective_agreement, eager_fallback
from dtensor_compile.stages import lowered
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.topology import network
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


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
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
def test_a_function_without_collectives_keeps_its_graphs_at_the_recompile_limit():
    x = torch.ones(2)

    def step(x, k):
        return x * k + int(torch.compiler.is_compiling())

    run = torch.compile(step, backend="dtensor_aten", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        assert [run(x, k)[0].item() for k in (2, 4, 6, 4, 2)] == [3, 5, 6, 5, 3]


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
            assert x.grad.to_local().unique().tolist() == [2 * len(own)]
            x.grad = None


def compiles_again_and_fails_on_rank(failing):
    x = distribute_tensor(torch.ones(4, 4), make_mesh((2,)), [Shard(0)])
    run = torch.compile(lambda x, k: x.full_tensor().sum() * k, backend="dtensor_aten", fullgraph=True, dynamic=False)
    fails = False
    with lowering_fails_if(lambda: fails):
        for _ in range(3):
            assert run(x, 1) == 16
        fails = dist.get_rank() == failing
        return run(x, 2 if fails else 1)


def test_a_recompilation_that_fails_is_named_where_the_others_lose_the_rank():
    other, own = errors_of(run_job(2, compiles_again_and_fails_on_rank, 1))
    assert "ValueError: nothing to lower it to" in own
    assert re.search(r"rank 1 could not compile <lambda> .* s ago: ValueError: nothing to lower it to", other), other


def test_a_rank_that_fails_and_takes_the_store_with_it_is_named():
    own, other = errors_of(run_job(2, compiles_again_and_fails_on_rank, 0, store_of_rank_0=True))
    assert "ValueError: nothing to lower it to" in own
    named = r"rank 0 could not compile <lambda>|the store of the job, which rank 0 holds in most jobs, is gone"
    assert re.search(named, other), other


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


# ---- errors that the program suppresses, or catches ------------------------------------------------------------------


def fails_with_suppressed_errors(failing, first):
    """Calls before and after a compilation that fails on ranks `failing`: the first one of the function, or a later."""
    x = distribute_tensor(torch.ones(4, 4), make_mesh((2,)), [Shard(0)])

    def step(x, k):
        return x.sum().full_tensor() + x.full_tensor().sum() * k

    run = torch.compile(step, backend="dtensor_aten", dynamic=False)
    fails = first and dist.get_rank() in failing
    suppressed = torch._dynamo.config.patch(suppress_errors=True)
    with suppressed, lowering_fails_if(lambda: fails), unittest.mock.patch.object(eager_fallback, "PATIENCE", 2.0):
        values = [run(x, 1)]
        fails = dist.get_rank() in failing
        values += [run(x, 2 if first or fails else 1) for _ in range(2)]
    return [float(value) for value in values]


def test_a_first_compilation_that_fails_on_one_rank_and_is_suppressed_is_left_to_eager_by_all():
    assert values_of(run_job(2, fails_with_suppressed_errors, (1,), True)) == [[32.0, 48.0, 48.0]] * 2


def test_one_that_fails_on_all_ranks_and_is_suppressed_is_left_to_eager_by_all():
    assert values_of(run_job(2, fails_with_suppressed_errors, (0, 1), False)) == [[32.0, 48.0, 48.0]] * 2


def test_a_recompilation_that_fails_on_one_rank_is_not_suppressed():
    other, own = errors_of(run_job(2, fails_with_suppressed_errors, (1,), False))
    named = r"rank 1 cannot compile step \(.*ValueError: nothing to lower it to.*\) and would run it in eager"
    assert re.search(rf"AgreementError: {named}.*, but rank 0 would run a compiled graph", own), own
    assert re.search(rf"rank 1 could not compile step .* s ago: AgreementError: {named}", other), other


def fails_on_rank_1_which_lives_on(rest):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    mesh = DeviceMesh.from_group(group, "cpu")
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    run = torch.compile(lambda x, k: x.full_tensor().sum() * k, backend="dtensor_aten", fullgraph=True, dynamic=False)
    assert run(x, 1) == 16
    if dist.get_rank() == 0:
        return float(run(x, 1))
    with lowering_fails_if(lambda: True), contextlib.suppress(Exception):
        run(x, 2)
    time.sleep(rest)
    return "alive"


@pytest.mark.slow
def test_a_rank_that_catches_its_error_and_lives_on_is_named_when_the_time_out_of_the_group_is_over():
    waits, lives = run_job(2, fails_on_rank_1_which_lives_on, 5.0)
    assert lives.value == "alive" and waits.seconds < lives.seconds
    assert re.search(r"rank 1 could not compile <lambda> .* s ago: .*nothing to lower it to", waits.error), waits.error


# ---- imports -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_import_that_fails_on_one_rank_is_named_on_the_others():
    other, own = errors_of(run_job(2, gather_with_a_package_that_is_broken_on_rank_1, imports=True))
    assert "ImportError: this installation is incomplete" in own
    assert re.search(r"rank 1 could not import the backend .* s ago: ImportError: this installation is", other), other
    assert "rank 1 has said nothing of them" in other and "it has not begun to compile" in other


# ---- caches --------------------------------------------------------------------------------------------------------


def train_step(shape, dynamic=False, options=None, fails_on=None):
    """A step with gradients, compared with plain torch; returns the number of graphs that caches had, and seconds."""
    mesh = make_mesh(shape, ("dp", "tp")[: len(shape)])
    own, whole = [Shard(0), Shard(1)][: len(shape)], [Replicate()] * len(shape)
    rows = 5 if dynamic else 8
    full = torch.arange(rows * 8.0).view(rows, 8).sub(20).requires_grad_(), torch.eye(8).add(0.5).requires_grad_()
    expected = torch.mm(*full).relu().sum()
    expected.backward()
    x = distribute_tensor(full[0].detach(), mesh, own).requires_grad_()
    weight = distribute_tensor(full[1].detach(), mesh, [Replicate(), Shard(0)][-len(shape) :]).requires_grad_()

    def step(x, weight):
        return (x @ weight).redistribute(placements=whole).to_local().relu().sum()

    counters.reset()
    run = torch.compile(step, backend="dtensor", fullgraph=True, dynamic=dynamic, options=options)
    begin = time.monotonic()
    with lowering_fails_if(lambda: dist.get_rank() == fails_on):
        value = run(x, weight)
        value.backward()
    seconds = time.monotonic() - begin
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(x.grad.full_tensor(), full[0].grad)
    torch.testing.assert_close(weight.grad.full_tensor(), full[1].grad)
    found = torch._dynamo.utils.counters
    return found["inductor"]["fxgraph_cache_hit"] + found["aot_autograd"]["autograd_cache_hit"], seconds


def train_steps(shape):
    """With a backward pass that is compiled with its forward pass, and one that is compiled when it runs."""
    return [train_step(shape)[0], train_step(shape, dynamic=True)[0]]


def folders(folder, world):
    """Environments in which each rank has a folder of caches of its own. Inductor does not compile programs to find out
    what the processor can do."""
    return [
        {"TORCHINDUCTOR_CACHE_DIR": str(folder / str(rank)), "TORCHINDUCTOR_VEC_ISA_OK": "1"} for rank in range(world)
    ]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A function that copies folders that a job of a world size and mesh has filled."""

    @functools.cache
    def filled(shape):
        folder = tmp_path_factory.mktemp("caches")
        world = math.prod(shape)
        assert (
            values_of(run_job(world, train_steps, shape, environments=folders(folder, world), limit=300))
            == [[0, 0]] * world
        )
        return folder

    def copied(shape):
        folder = tmp_path_factory.mktemp("copy") / "caches"
        shutil.copytree(filled(shape), folder)
        return folder

    return copied


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_caches_that_are_cold_on_one_rank(warm, shape):
    folder, world = warm(shape), math.prod(shape)
    shutil.rmtree(folder / "1")
    found = values_of(run_job(world, train_steps, shape, environments=folders(folder, world), limit=300))
    assert found[1] == [0, 0]
    assert all(hits > 0 for rank in range(world) if rank != 1 for hits in found[rank]), found


def step_with_other_collectives_on_rank_1():
    """Rank 1 sends one mesh dim after the other, as it would if it had not found the groups over both."""
    with unittest.mock.patch.object(network, "merges", lambda text: dist.get_rank() != 1):
        return train_step((2, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cached_graph_is_compared_with_those_that_other_ranks_compile(warm):
    folder = warm((2, 2))
    shutil.rmtree(folder / "1")
    outcomes = run_job(4, step_with_other_collectives_on_rank_1, environments=folders(folder, 4), limit=300)
    for error in errors_of(outcomes):
        assert re.search(r"AgreementError: ranks \d and \d compiled graph 0 of step", error), error


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_finds_its_graph_is_told_that_another_cannot_compile_it(warm):
    folder = warm((2,))
    shutil.rmtree(folder / "1")
    other, own = errors_of(run_job(2, train_step, (2,), False, None, 1, environments=folders(folder, 2)))
    assert "ValueError: nothing to lower it to" in own
    assert re.search(
        r"rank 1 could not compile what rank 0 compiled as graph 0 of step.*Rank 1 said: .*ValueError", other
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_without_a_compiler_runs_operator_by_operator(warm):
    folder = warm((2,))
    shutil.rmtree(folder / "1")
    environments = folders(folder, 2)
    environments[1]["CXX"] = "/nonexistent"
    (hits, _), (none, _) = values_of(run_job(2, train_step, (2,), environments=environments, limit=200))
    assert hits and not none


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_folder_of_caches_that_one_rank_cannot_make_is_an_error_on_every_rank(warm, tmp_path):
    """``torch.compile`` itself raises on that rank, before it loads a backend."""
    (tmp_path / "file").touch()
    environments = folders(warm((2,)), 2)
    environments[1]["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "file" / "caches")
    other, own = errors_of(run_job(2, train_step, (2,), environments=environments))
    assert "NotADirectoryError" in own
    assert re.search(r"rank 1 has said nothing of them within \d+ s: it has not begun to compile step", other), other


@pytest.fixture(params=["ro", "size=64k"])
def unwritable(request, tmp_path):
    """A folder that is read-only, and one in a file system without space."""
    command = ["mount", "-t", "tmpfs", "-o", request.param, "none", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    with contextlib.suppress(OSError):
        (tmp_path / "file").write_bytes(bytes(128 * 1024))
    yield tmp_path, "Read-only file system" if request.param == "ro" else "No space left on device"
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_folder_of_caches_that_one_rank_cannot_write_is_an_error_on_every_rank(warm, unwritable):
    folder, message = unwritable
    environments = folders(warm((2,)), 2)
    environments[1]["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    other, own = errors_of(run_job(2, train_step, (2,), environments=environments))
    assert message in own
    assert re.search(rf"[Rr]ank 1 (said|could not compile step.*): .*{message}", other), other


# ---- agreement of torch --------------------------------------------------------------------------------------------


def train_steps_with_torchs_agreement(shape):
    with torch._functorch.config.patch(_sync_cache_decision_cross_ranks=True):
        return train_steps(shape)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not hasattr(torch._functorch.config, "_sync_cache_decision_cross_ranks"),
    reason="this release of torch does not compare cache hits of ranks",
)
def test_ranks_of_which_torch_drops_lone_hits(warm):
    folder = warm((2,))
    shutil.rmtree(folder / "1")
    values_of(run_job(2, train_steps_with_torchs_agreement, (2,), environments=folders(folder, 2), limit=300))


# ---- what is sent --------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_agreement_sends_nothing_over_groups_of_the_program():
    """As NCCL requires, which has no second communicator for it: the first call, which compiles, agrees and makes the
    groups over several mesh dims, sends over groups that existed before what a later call sends."""
    mesh = make_mesh((2, 2), ("dp", "tp"))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]).requires_grad_()
    groups = [dist.group.WORLD, mesh.get_group("dp"), mesh.get_group("tp")]

    def sent(call):
        before = [group._get_sequence_number_for_group() for group in groups]
        call()
        return [group._get_sequence_number_for_group() - count for group, count in zip(groups, before)]

    def step(x):
        return x.redistribute(placements=[Shard(0), Replicate()]).square().sum().full_tensor()

    assert sent(lambda: dist.barrier(mesh.get_group("tp"))) == [0, 0, 1]
    run = torch.compile(step, backend="dtensor_aten", fullgraph=True)
    first, second = (sent(lambda: run(x).backward()) for _ in range(2))
    assert first == second and any(first)
    names = torch.compile(lambda x, name: x.full_tensor().sum() + len(name), backend="dtensor_aten")
    with torch._dynamo.config.patch(recompile_limit=2):
        calls = [sent(lambda: names(x.detach(), "n" * (i + 1))) for i in range(2)]
    assert calls[0] == calls[1]
