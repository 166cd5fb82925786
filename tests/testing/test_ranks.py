"""The ranks that all other tests stand on: results come back in order, and failures and hangs end."""

import ctypes
import datetime
import os
import pathlib
import time

import pytest
import torch
import torch.distributed as dist

from dtensor_compile.testing import RankError, on_ranks, ranks, run_on_ranks


@on_ranks(2)
def test_body_runs_on_every_rank():
    x = torch.ones(2) * dist.get_rank()
    dist.all_reduce(x)
    assert x.tolist() == [1, 1]


def rank_times(factor):
    return dist.get_rank() * factor


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("only rank 1")
    dist.barrier()


def crash_on_one():
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    return dist.get_rank()


def groups_and_threads(groups):
    """Time-outs of as many new groups, and the threads of gloo's devices and the workers that they add."""

    def threads(name):
        return sum(comm.read_text() == f"{name}\n" for comm in pathlib.Path("/proc/self/task").glob("*/comm"))

    devices, workers = threads("gloo_tcp_loop"), threads("pt_gloo_runloop")
    made = [dist.new_group([0, 1], timeout=datetime.timedelta(seconds=10 + index)) for index in range(groups)]
    for group in made:
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2, 2, 2]
    found = [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in made]
    return found, threads("gloo_tcp_loop") - devices, threads("pt_gloo_runloop") - workers


def sleep_on_one():
    if dist.get_rank() == 1:
        time.sleep(60)
    return dist.get_rank()


def test_results_come_in_order_of_rank():
    assert run_on_ranks(2, rank_times, 3) == [0, 3]


def test_groups_share_the_thread_that_waits_for_the_network_and_nothing_else():
    assert run_on_ranks(2, groups_and_threads, 4) == [([10, 11, 12, 13], 0, 4)] * 2


@pytest.mark.slow
def test_failure_of_one_rank_names_it_and_ends_the_others():
    with pytest.raises(RankError, match="only rank 1"):
        run_on_ranks(2, fail_on_one)
    assert run_on_ranks(2, rank_times, 1) == [0, 1]


def test_crash_of_one_rank_ends_with_its_signal_and_stack():
    with pytest.raises(
        RankError, match=r"rank 0: ok\nrank 1: [^\n]*SIGSEGV; it was at\nFatal Python error[\s\S]*crash_on_one"
    ):
        run_on_ranks(2, crash_on_one)


def test_hang_of_one_rank_ends_with_its_stack():
    run_on_ranks(2, rank_times, 1)  # on a busy machine ranks take longer to start than they get below
    with pytest.raises(RankError, match=r"rank 1: no answer[\s\S]*sleep_on_one"):
        run_on_ranks(2, sleep_on_one, timeout=10)


@pytest.mark.slow
def test_of_too_many_processes_those_used_longest_ago_are_ended(monkeypatch):
    monkeypatch.setattr(ranks, "_jobs", {})
    monkeypatch.setattr(ranks, "MOST_RANKS", 3)
    try:
        for world, left in ((1, [1]), (2, [1, 2]), (1, [2, 1]), (2, [1, 2])):
            run_on_ranks(world, os.getpid)
            assert list(ranks._jobs) == left
        first = ranks._jobs[1].processes
        run_on_ranks(3, os.getpid)
        assert list(ranks._jobs) == [3] and not any(process.is_alive() for process in first)
    finally:
        ranks.end_jobs()


def own_parent():
    return os.getppid()


def test_ranks_are_forked_also_after_inductor_has_set_its_variables(monkeypatch):
    monkeypatch.setattr(ranks._Forked, "environment", None)
    ranks.end_jobs()
    before = set(run_on_ranks(2, own_parent))
    assert len(before) == 1 and os.getpid() not in before
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", "") + "_other")
    ranks.end_jobs()
    assert set(run_on_ranks(2, own_parent)) == before, "another process has imported torch for them"
    ranks.end_jobs()
