"""What goes wrong around a compilation ends in an error or in the right result, and in time: ranks that die, passes
that raise, compilers that die, disks that are full."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtensor_compile import record
from dtensor_compile.recording.recorder import watch_graphs
from dtensor_compile.runtime import collective_agreement as agree
from dtensor_compile.testing import RankError, assert_parity, make_mesh, on_ranks, run_on_ranks

#: Seconds in which a job whose rank 1 has died has to be over.
LIMIT = 150


def die():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def step(x):
    return (x.redistribute(placements=[Replicate()]) * 2).relu().redistribute(placements=[Shard(0)])


def argument():
    return distribute_tensor(torch.ones(4, 2), make_mesh((2,), ("tp",)), [Shard(0)]).requires_grad_()


def run():
    agree.PATIENCE = 0.5
    out = torch.compile(step, backend="dtensor_aten", fullgraph=True)(argument())
    return out


def dies_in_compile():
    with watch_graphs(lambda stage, graph: die()):
        x = run()
    dist.barrier()
    return x.shape


def dies_between_compile_and_run():
    reach = agree.Agreement.reach

    def reach_and_die(self):
        reach(self)
        die()

    with unittest.mock.patch.object(agree.Agreement, "reach", reach_and_die):
        run()
    dist.barrier()


def dies_in_the_middle_of_a_step():
    out = run()
    die()
    out.to_local().sum().backward()
    dist.barrier()


#: A rank that dies while a compiled call runs is in tests/runtime/test_dying_rank.py, too.
LATER = (dies_between_compile_and_run, dies_in_the_middle_of_a_step)


@pytest.mark.parametrize(
    "program", [dies_in_compile, *(pytest.param(program, marks=pytest.mark.slow) for program in LATER)]
)
def test_the_death_of_a_rank_ends_the_others_with_an_error(program):
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0: Traceback[\s\S]*rank 1: the process ended") as error:
        run_on_ranks(2, program, timeout=LIMIT)
    assert time.monotonic() - begin < LIMIT + 20
    assert "Connection" in str(error.value) or "closed" in str(error.value), error.value


JOB = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)], src_data_rank=None)
whole = [Replicate()]
run = torch.compile(lambda x: (x.sin() * 2).redistribute(placements=whole) + 1, backend="dtensor", fullgraph=True)
{before}
try:
    out = run(x).to_local()
    torch.testing.assert_close(out, torch.arange(8.0).view(4, 2).sin() * 2 + 1)
    print("right\\n", end="", flush=True)
except Exception as error:
    print("raised", type(error).__name__, str(error)[:300].replace(chr(10), " ") + "\\n", end="", flush=True)
dist.destroy_process_group()
"""


def job(tmp_path, before="", **environment):
    """What each of two ranks says of a compilation through Inductor."""
    script = tmp_path / "job.py"
    script.write_text(JOB.format(before=before))
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), **environment
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("right", "raised"))]
    assert len(lines) == 2, (result.stdout + result.stderr)[-3000:]
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", '[ "$RANK" = 0 ] ||'])
def test_a_compiler_that_dies_leaves_the_graph_to_operators(tmp_path, where):
    # On every rank, or on rank 1 alone: collectives are the same either way.
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *.cpp*) {where} kill -9 $$;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    assert job(tmp_path, CXX=str(compiler)) == ["right", "right"]


@pytest.mark.slow
@on_ranks(2)
def test_kernels_that_do_not_compile_forward_and_backward_are_reported():
    def program(x):
        return (x.redistribute(placements=[Replicate()]).softmax(-1) * torch.ones(2, 2).sum()).redistribute(
            placements=[Shard(0)]
        )

    with tempfile.TemporaryDirectory() as folder:
        compiler = pathlib.Path(folder, "g++")
        compiler.write_text(
            '#!/bin/sh\ncase "$*" in *.cpp*) echo "k.cpp:7: error: no such instruction" >&2; exit 1;; esac\n'
            'exec g++ "$@"\n'
        )
        compiler.chmod(0o755)
        options = {"cpp.cxx": (None, str(compiler)), "fx_graph_cache": False}
        with record() as recording, pytest.warns(UserWarning, match="kernel of the backward graph does not compile"):
            assert_parity(program, [argument()], loss=lambda out: out.to_local().square().sum(), options=options)
        decided = [d for d in recording.report().ours.decisions if d.kind == "uncompiled_kernels"]
        assert {(d.before, d.after) for d in decided} == {("inductor", "aten")}
        assert any("forward" in d.reason and "k.cpp:7: error: no such instruction" in d.reason for d in decided)
        with pytest.raises(Exception, match="C\\+\\+ compile error"):
            assert_parity(program, [argument()], options={**options, "strict": True})


FULL = """
import builtins, errno
stock = builtins.open
def full(file, mode="r", *args, **kwargs):
    if {folder!r} in str(file) and set(mode) & set("wxa") and {what!r} in str(file):
        raise OSError(errno.ENOSPC, "No space left on device", str(file))
    return stock(file, mode, *args, **kwargs)
builtins.open = full
import pathlib, io
pathlib.Path.open = lambda self, mode="r", *args, **kwargs: full(self, mode, *args, **kwargs)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["aotautograd", ""])
def test_a_disk_that_is_full_is_an_error_or_no_cache(tmp_path, what):
    # Entries that cannot be kept cost nothing but the cache; kernels that cannot be written cannot run.
    lines = job(tmp_path, FULL.format(folder=str(tmp_path / "cache"), what=what))
    assert all(line == "right" or not what and "No space left" in line for line in lines), lines


@pytest.mark.slow
def test_two_jobs_at_once_share_a_cache(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB.format(before=""))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    for started in jobs:
        out, _ = started.communicate(timeout=200)
        assert out.count("right") == 2, out
