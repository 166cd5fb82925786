"""Ranks whose graphs cannot run together raise before they hang; ranks that legitimately differ go on, and do not
wait.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import time
import unittest.mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtensor_compile.lowering.lower import lower_redistributions
from dtensor_compile.recording.recorder import graph_name
from dtensor_compile.runtime import collective_agreement as agree
from dtensor_compile.runtime import look_out
from dtensor_compile.runtime.collective_agreement import Announcement, Call
from dtensor_compile.stages import lowered
from dtensor_compile.testing import RankError, make_mesh, on_ranks, run_on_ranks
from tests.cases import mostly_slow
from tests.stages import with_run


def compiled(function, **kwargs):
    return torch.compile(function, backend="dtensor_aten", fullgraph=True, **kwargs)


def seconds(run):
    begin = time.monotonic()
    run()
    return time.monotonic() - begin


def patience(value):
    return unittest.mock.patch.object(agree, "PATIENCE", value)


def patient(test):
    """Ranks wait for each other for a minute, so that a busy machine does not look like a rank that is not coming."""

    @functools.wraps(test)
    def run(**arguments):
        with patience(60.0):
            test(**arguments)

    return run


# ---- digests -------------------------------------------------------------------------------------------------------


def test_sizes_count_where_both_are_known():
    one, two = Call("all_reduce sum float32", 8, ""), Call("all_reduce sum float32", 9, "")
    a, b = Announcement.of([one], False), Announcement.of([two], False)
    assert not a.agrees(b.digest) and a.agrees(Announcement.of([two], True).digest)
    assert Announcement.of([one], True).agrees(b.digest)
    assert not a.agrees(Announcement.of([one, one], True).digest)
    assert not a.agrees(Announcement.of([Call("all_reduce max float32", 8, "")], False).digest)


# ---- ranks that cannot run together --------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(4)
def test_redistributions_over_other_groups_are_an_error_on_every_rank():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    rows = dist.get_rank() in (0, 3)

    def gather_along_one(x):
        return x.redistribute(placements=[Replicate(), Shard(1)] if rows else [Shard(0), Replicate()])

    with patience(15.0), pytest.raises(Exception, match="AgreementError.* and rank \\d has none over these"):
        compiled(gather_along_one)(x)


@on_ranks(2)
@patient
def test_a_branch_on_the_rank_is_an_error_on_every_rank():
    rank, mesh = dist.get_rank(), make_mesh((2,), ("tp",))

    def step(x, first):
        y = x.redistribute(placements=[Replicate()]) if first else x
        return (
            y.to_local() * 2,
            x.sum().full_tensor(),
        )  # the gathered tensor itself: a sum of it would be reduced, not gathered

    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    there = "all_gather_into_tensor float32 of 4 elements" if rank else "all_reduce sum float32 of 1 elements"
    with pytest.raises(Exception, match="compiled graph 0 of step") as error:
        compiled(step)(x, rank == 0)
    with pytest.raises(Exception, match="compiled graph 0 of step"):  # no rank remembers that it has said this before
        compiled(step)(x, rank == 0)
    text = str(error.value)
    assert f"ranks {rank} and {1 - rank}" in text and f"rank {1 - rank} (of {1 + rank}) has {there}" in text
    assert "Collective 1" in text and "test_collective_agreement.py" in text and "branch on the rank" in text
    x = x + 1  # the job still runs
    assert compiled(lambda x: x.full_tensor())(x).sum() == 16


@on_ranks(2, timeout=60)
@patient
def test_what_a_rank_announced_for_another_graph_says_nothing_of_this_one():
    rank, mesh = dist.get_rank(), make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    for run in (compiled(lambda x: x.sum().full_tensor()), compiled(lambda x: x.sum().full_tensor() + 1)):
        run(x)  # the collectives of rank 1 below
    if rank == 0:
        time.sleep(2)  # rank 1 compiles first
    with pytest.raises(Exception, match="to different collectives over the same process group"):
        compiled(lambda x: x.full_tensor() if rank == 0 else x.sum().full_tensor())(x)


@on_ranks(2)
@patient
def test_a_rank_that_recompiles_to_more_is_not_stopped_by_those_that_do_not():
    rank, mesh = dist.get_rank(), make_mesh((2,), ("tp",))
    run = compiled(lambda x, more: x.full_tensor() + (x.sum().full_tensor() if more else 0))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    run(x, False)
    with patience(0.5):  # rank 1 runs what it has, with fewer collectives; rank 0 says so and goes on
        ran = run(x, rank == 0)
        if rank == 1:  # what rank 0 still waits for
            x.sum().full_tensor()
    assert ran.sum() == (8 + 8 * 8 if rank == 0 else 8)


@pytest.mark.parametrize("which", ["forward", "backward", "backward of one rank"])
@on_ranks(3, timeout=60)
@patient
def test_a_rank_that_cannot_compile_says_so_to_those_that_wait(which):
    """In the last case ranks 0 and 1 compile the backward pass with the forward pass: of five columns rank 2 has one,
    which is no symbol.
    """
    rank, stock = dist.get_rank(), lower_redistributions

    def lower(graph, *options):
        if rank == 2 and which.startswith(graph_name(graph)):
            raise ValueError("nothing to lower it to\nin this place")
        return stock(graph, *options)

    def step(x):
        run = compiled(
            lambda x: x.norm(dim=1).redistribute(placements=[Replicate()]), dynamic=which == "backward of one rank"
        )
        run(x).to_local().sum().backward()

    # Ranks do not wait where they have announced the same before.
    dtype = {"forward": torch.float64, "backward": torch.float32}.get(which, torch.float16)
    columns = 5 if which == "backward of one rank" else 3
    x = distribute_tensor(torch.ones(5, columns, dtype=dtype), make_mesh((3,), ("tp",)), [Shard(1)]).requires_grad_()
    message = "nothing to lower it to"
    if rank != 2:
        message = f"rank 2 could not compile .* all_reduce.*Rank 2 said: ValueError: {message}"
    with with_run(lowered, "LOWER", "lower_redistributions", lower), pytest.raises(Exception, match=message):
        step(x)
    step(x)  # the job still runs
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((5, columns), columns**-0.5, dtype=dtype))


# ---- ranks that differ and go on -----------------------------------------------------------------------------------


@on_ranks(2)
@patient
def test_only_one_rank_recompiles_and_nobody_waits():
    rank, mesh = dist.get_rank(), make_mesh((2,), ("tp",))

    def step(x, own):
        return x.redistribute(placements=[Replicate()]).to_local() * own.sum()

    run = compiled(step, dynamic=False)
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    run(x, torch.ones(3))
    for size in (3, 4, 5):  # rank 1 runs what it has
        own = torch.ones(size if rank == 0 else 3)
        assert seconds(lambda: run(x, own)) < agree.PATIENCE
        assert run(x, own).sum() == 8 * len(own)


@on_ranks(2)
@patient
def test_other_functions_with_the_same_collectives_do_not_wait():
    mesh = make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
    run = compiled((lambda x: x.full_tensor() + 1) if dist.get_rank() else (lambda x: x.full_tensor().relu() + 1))
    assert seconds(lambda: run(x)) < agree.PATIENCE
    assert run(x).sum() == 20


@on_ranks(2)
def test_a_rank_that_runs_eager_is_not_waited_for_long():
    mesh = make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.ones(7, 2), mesh, [Shard(0)])
    run = (lambda x: x.full_tensor() * 3) if dist.get_rank() else compiled(lambda x: x.full_tensor() * 3)
    with patience(0.3):
        assert run(x).sum() == 42


@on_ranks(4)
@patient
def test_rows_of_a_mesh_run_different_programs():
    mesh = make_mesh((2, 2), ("pp", "tp"))
    stage, tp = mesh.get_local_rank("pp"), mesh["tp"]

    def first(x):
        return x.redistribute(placements=[Replicate()]).to_local() + 1

    def second(x):
        return x.sum().full_tensor() + x.redistribute(placements=[Replicate()]).to_local()

    x = DTensor.from_local(torch.ones(2, 2), tp, [Shard(0)], run_check=False)
    run = compiled(second if stage else first)
    assert seconds(lambda: run(x)) < agree.PATIENCE
    assert run(x).sum() == (8 * 9 if stage else 16)


@on_ranks(2)
@patient
def test_uneven_shards_and_their_backward_agree():
    mesh = make_mesh((2,), ("tp",))
    run = compiled(lambda x: (x * 2).redistribute(placements=[Replicate()]).redistribute(placements=[Shard(1)]))
    for rows in (5, 3, 1):
        x = distribute_tensor(torch.ones(rows, 3), mesh, [Shard(0)]).requires_grad_()
        assert seconds(lambda: run(x).to_local().sum().backward()) < agree.PATIENCE
        assert x.grad.full_tensor().tolist() == [[2.0] * 3] * rows


@on_ranks(3)
@patient
def test_a_backward_that_one_rank_compiles_with_its_forward():
    """Of five columns rank 2 has one, which is no symbol; it compiles its backward pass when that runs."""
    run = compiled(lambda x: torch.linalg.vector_norm(x, dim=1).redistribute(placements=[Shard(0)]), dynamic=True)
    x = distribute_tensor(torch.ones(5, 5), make_mesh((3,)), [Shard(1)]).requires_grad_()
    assert seconds(lambda: run(x).full_tensor().sum().backward()) < agree.PATIENCE
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((5, 5), 5**-0.5))


@contextlib.contextmanager
def warnings_logged():
    """Gathers the warnings about other ranks."""
    messages = []
    with unittest.mock.patch.object(agree.log, "warning", lambda text, *args: messages.append(text % args)):
        yield messages


@contextlib.contextmanager
def quiet(seconds):
    """A rank waits for half a second before it goes on, and says after so many that another has not come."""
    patches = (
        unittest.mock.patch.multiple(agree, PATIENCE=0.5, QUIET=seconds),
        unittest.mock.patch.object(look_out, "PAUSE", 0.1),
    )
    with patches[0], patches[1], warnings_logged() as messages:
        yield messages


@pytest.mark.parametrize(
    "when", mostly_slow(["before it compiles", "while it compiles", "in eager"], "while it compiles")
)
@on_ranks(2, timeout=60)
def test_a_rank_that_comes_late_is_no_alarm(when):
    rank, stock = dist.get_rank(), lower_redistributions

    def lower(graph, *options):
        time.sleep(3 if rank and when == "while it compiles" else 0)
        return stock(graph, *options)

    # Other collectives for each case: a rank does not announce again what it has announced.
    rows = 11 + ["before it compiles", "while it compiles", "in eager"].index(when)
    x = distribute_tensor(torch.ones(rows, 3, dtype=torch.float64), make_mesh((2,), ("tp",)), [Shard(0)])

    def function(x):
        return x.full_tensor() * rows

    with quiet(60.0) as messages, with_run(lowered, "LOWER", "lower_redistributions", lower):
        run = function if rank and when == "in eager" else compiled(function)
        time.sleep(1 if when == "while it compiles" and not rank else 3 if when != "while it compiles" and rank else 0)
        assert run(x).sum() == 3 * rows * rows
        assert not messages
        assert rank or not look_out._looks


@on_ranks(2, timeout=60)
def test_a_rank_that_does_not_come_is_named_while_the_others_wait():
    x = distribute_tensor(torch.ones(14, 3, dtype=torch.float64), make_mesh((2,), ("tp",)), [Shard(0)])
    with quiet(1.0) as messages:
        if dist.get_rank():
            time.sleep(5)  # rank 0 has compiled, and is in its graph
            x.full_tensor()
        else:
            compiled(lambda x: x.full_tensor() * 5)(x)
            (sentence,) = messages
            assert re.search(
                r"all_gather_into_tensor float64.*rank 1 has said nothing of them within \d s: "
                r"it has not begun to compile",
                sentence,
            )


@on_ranks(2, timeout=60)
def test_a_rank_that_comes_late_with_other_collectives_raises_and_the_others_say_why_they_wait():
    rank, mesh = dist.get_rank(), make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.ones(15, 3, dtype=torch.float64), mesh, [Shard(0)])

    def step(x):
        return x.sum().full_tensor() if rank else x.full_tensor()

    with quiet(60.0) as messages:
        if rank:
            time.sleep(3)
            with pytest.raises(Exception, match="AgreementError.* to different collectives"):
                compiled(step)(x)
            time.sleep(1)
            x.full_tensor()  # what rank 0 waits for
        else:
            compiled(step)(x)
            assert len(messages) == 1 and "to different collectives over the same process group" in messages[0]


@on_ranks(2, timeout=60)
def test_a_rank_that_has_compiled_the_same_graph_without_its_collective_is_an_alarm_at_once():
    rank, mesh = dist.get_rank(), make_mesh((2,), ("tp",))

    def step(x):
        return x if rank else funcol.all_reduce(x, "sum", mesh)

    with quiet(60.0) as messages:
        if rank:
            compiled(step)(torch.ones(3, dtype=torch.float64))
            time.sleep(3)
            funcol.all_reduce(torch.ones(3, dtype=torch.float64), "sum", mesh).sum()
        else:
            assert compiled(step)(torch.ones(3, dtype=torch.float64)).sum() == 6
            assert len(messages) == 1 and "it does not compile now" in messages[0]


def dies_before_it_calls():
    with quiet(60.0) as messages:
        x = distribute_tensor(torch.ones(16, 3), make_mesh((2,), ("tp",)), [Shard(0)])
        if dist.get_rank():
            time.sleep(3)
            os._exit(7)
        try:
            compiled(lambda x: x.full_tensor() * 5)(x)
        except RuntimeError as error:
            raise RuntimeError(f"rank 0 said {messages}") from error


def test_a_rank_that_dies_is_named_with_the_error():
    with pytest.raises(RankError, match=r"rank 0 said \['graph 0 of .* rank 1 has said nothing of them within"):
        run_on_ranks(2, dies_before_it_calls, timeout=60)


@pytest.mark.parametrize("ends", mostly_slow(["the process", "the store"], "the process"))
def test_the_thread_that_looks_out_ends_with(ends, tmp_path):
    look = "False" if ends == "the process" else "bool(client.check(['key']))"
    program = f"""
import threading, time
import torch.distributed as dist
from dtensor_compile.runtime import look_out
look_out.PAUSE = 0.01
server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
client = dist.TCPStore("127.0.0.1", server.port, 1, is_master=False)
before = threading.active_count()
look_out.look_out(lambda: {look})
assert threading.active_count() == before + 1
if {ends == "the store"}:
    del server
    time.sleep(2)
    assert threading.active_count() == before
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
