"""Programs that cannot work: an error that says what to do, the same on every rank, and no rank that waits."""

import pathlib
import re
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dtensor_compile.capture.checks import check_mesh
from dtensor_compile.compat.release import minor_release
from dtensor_compile.errors import MeshError, NoProcessGroupError
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks


def message_of(function, *args):
    """Type and text of what `function` raises, eager and compiled."""
    answers = []
    for run in (function, torch.compile(function, backend="dtensor", fullgraph=True)):
        try:
            run(*args)
            answers.append((None, ""))
        except Exception as error:
            answers.append((type(error).__name__, str(error)))
    return answers


def _alone(code):
    """What a process without a process group says."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_a_program_that_needs_a_process_group_and_has_none():
    result = _alone("""
        import torch, torch.distributed as dist
        import torch.distributed._functional_collectives as funcol

        def traced(x):
            return funcol.all_reduce(x, "sum", "0") + 1

        def own(x):
            dist.all_reduce(x)
            return x + 1

        for function in (traced, own):
            try:
                torch.compile(function, backend="dtensor", fullgraph=True)(torch.ones(2))
            except Exception as error:
                print(error)
        """)
    assert "call torch.distributed.init_process_group()" in result.stdout
    assert "Default process group has not been initialized" in result.stdout


@pytest.mark.slow
def test_a_program_without_anything_distributed_needs_no_process_group():
    result = _alone("""
        import torch, warnings

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.0))

        def loss(x):
            torch.manual_seed(3)
            return (model(x).exp() * torch.rand(4)).sum()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for backend in ("dtensor", "dtensor_aten"):
                for batch in (3, 5):
                    x = torch.randn(batch, 4)
                    results = []
                    for run in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
                        model.zero_grad()
                        out = run(x)
                        out.backward()
                        results.append([out.detach(), *(p.grad for p in model.parameters())])
                    torch.testing.assert_close(*results)
        print(len([w for w in caught if "there is no process group" in str(w.message)]))
        """)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr


@pytest.mark.slow
def test_threads_that_ask_for_the_backend_at_once():
    result = _alone("""
        import threading, torch, torch._dynamo

        together, errors = threading.Barrier(6), []

        def ask(i):
            together.wait()
            try:
                torch.compile(lambda x: x, backend=("dtensor", "dtensor_aten")[i % 2])
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(errors, {"dtensor", "dtensor_aten"} <= {*torch._dynamo.list_backends()})
        """)
    assert (result.returncode, result.stdout) == (0, "[] True\n"), result.stderr


def mesh_too_large():
    mesh = DeviceMesh("cpu", [0, 1, 2], _init_backend=False, _rank=dist.get_rank())
    with pytest.raises(MeshError) as error:
        check_mesh(mesh)
    return str(error.value)


def test_mesh_with_ranks_that_do_not_exist():
    messages = run_on_ranks(2, mesh_too_large)
    assert messages[0] == messages[1]
    assert "covers ranks [2], but the job has 2 ranks (0..1): start 3 processes or make the mesh smaller" in messages[0]


def device_not_there():
    mesh = DeviceMesh("xpu", [0, 1], _init_backend=False, _rank=dist.get_rank())
    with pytest.raises(MeshError) as error:
        check_mesh(mesh)
    return str(error.value)


def test_device_type_that_is_not_there():
    messages = run_on_ranks(2, device_not_there)
    assert messages[0] == messages[1]
    assert "'xpu', which is not available in this process" in messages[0]


@on_ranks(2)
def test_process_group_of_the_mesh_is_gone():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("gone",))
    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("gone",))
    dist.barrier()  # else a rank ends the group while the other one still connects
    dist.destroy_process_group(group)
    with pytest.raises(NoProcessGroupError, match="dim gone of mesh .* does not exist any more"):
        check_mesh(mesh)


def redistributed_to_placements_that_do_not_fit():
    mesh = make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
    return message_of(lambda x: x.redistribute(placements=[Shard(2)]), x)


def test_placements_that_do_not_fit_are_named_with_the_users_line():
    answers = run_on_ranks(2, redistributed_to_placements_that_do_not_fit)
    assert answers[0] == answers[1]
    _, text = answers[0][1]
    assert "a tensor of shape [4, 6] cannot be Shard(dim=2) over mesh dim tp" in text and "a dim from 0 to 1" in text
    assert "in <lambda>" in text and "test_bad_input.py" in text


def input_with_too_many_placements():
    mesh = make_mesh((2,), ("tp",))
    x = DTensor.from_local(torch.randn(4, 6), mesh, [Replicate(), Replicate()], run_check=False)
    return message_of(lambda x: x + 1, x)


def test_input_with_more_placements_than_mesh_dims():
    answers = run_on_ranks(2, input_with_too_many_placements)
    assert answers[0] == answers[1]
    assert "has 1 dims, and every mesh dim takes one placement" in answers[0][1][1]


def shard_to_partial():
    mesh = make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
    return message_of(lambda x: x.redistribute(placements=[Partial()]), x)


def mixed_reductions():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    return message_of(
        lambda x: DTensor.from_local(x, mesh, [Partial(), Partial("max")]).full_tensor(), torch.ones(4, 6)
    )


def unknown_reduction():
    mesh = make_mesh((4,), ("tp",))
    return message_of(lambda x: DTensor.from_local(x, mesh, [Partial("median")]).full_tensor(), torch.ones(4, 6))


@pytest.mark.parametrize(
    ("case", "eager", "message"),
    [
        (mixed_reductions, "Mixed Partial reduce types are not supported",
         "a DTensor cannot be partial in sum and max at once: the value depends on which is reduced first; reduce one "
         "before the other becomes partial, as in [P(sum), R]"),
        (unknown_reduction, "Unrecognized reduce_op: median",
         "a tensor of shape [4, 6] cannot be Partial('median'): no collective computes this reduction; supported are "
         "sum, avg, min, max, product, band, bor, bxor"),
    ],
)  # fmt: skip
def test_reductions_that_cannot_be_combined_are_named_with_the_users_line(case, eager, message):
    for (_, eager_text), (_, text) in run_on_ranks(4, case):
        assert eager in eager_text
        assert message in text.replace("\\'", "'"), text
        assert "in <lambda>" in text and "test_bad_input.py" in text


def mixed_with_plain():
    mesh = make_mesh((2,), ("tp",))
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
    return message_of(lambda x, y: x + y, x, torch.randn(4, 6))


#: As of 2.14 torch redistributes shards to partial sums.
REFUSED = [mixed_with_plain] + [shard_to_partial] * (minor_release(torch.__version__) in ("2.11", "2.13"))


@pytest.mark.parametrize("case", REFUSED)
def test_same_message_as_eager_with_the_users_line_on_every_rank(case):
    answers = run_on_ranks(2, case)
    assert answers[0] == answers[1]
    (eager_type, eager_text), (ours_type, ours_text) = answers[0]
    assert eager_type is not None and ours_type is not None
    first = re.sub(r"\s+", " ", eager_text.strip().splitlines()[0])[:80]
    assert first in re.sub(r"\s+", " ", ours_text), ours_text
    assert "test_bad_input.py" in ours_text and case.__name__ in pathlib.Path(__file__).read_text()
