"""The catalogue of causes: every example breaks for its cause, and the breaks of many programs are known."""

import contextlib
import json
import linecache
import logging
import pathlib
import textwrap
import warnings
import zlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode, visualize_sharding
from torch.utils.checkpoint import checkpoint

from dtensor_compile.causes import CAUSES, break_title
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.recording.recorder import record
from dtensor_compile.report.breaks import cause_of, recompile_cause
from dtensor_compile.report.stock_causes import STOCK_CAUSES, breaks_under, classify

_MODULES = (torch, logging, warnings, zlib)
_IMPORTED = (
    DeviceMesh,
    init_device_mesh,
    CPUOffloadPolicy,
    fully_shard,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
NAMES = {"dist": dist, "CommDebugMode": CommDebugMode, **{thing.__name__: thing for thing in (*_MODULES, *_IMPORTED)}}

#: Programs for causes of our own whose example needs more around it, or shows one of several ways.
PROGRAMS = {
    "member-argument": "mesh.size(x)",
    "placement-argument": "Shard(x)",
    "member-not-traced": "mesh.a_new_member()",
    "symbolic-spec": "(d + 1)._spec",
    "leaf-hooks": "(x @ hooked_weight).sum().backward()",
    "hook-not-traced": "x = counted(x.detach().requires_grad_())",
    "hook-strides": "x = strided(x.detach().requires_grad_())",
    "looks-at-execution": "visualize_sharding(d)",
    "number-needed": "x = x + len([0] * int(x.sum().item()))",
    "generator-inner": "x = checkpoint(lambda x: x + torch.rand(4, generator=generator), x, use_reentrant=False)",
}
#: Causes of our own that other tests trigger, or that need a device that is not there.
ELSEWHERE = {
    "data-parallel-setting": "tests/variables/test_data_parallel.py",
    "generator-of-device": "a GPU",
    "packed-sequence": "tests/spmd/test_recurrent.py",
}
#: Tested by themselves, below.
NO_EXAMPLE = {"unknown", "error-in-compiler", "recompile-limit"}


class Object:
    name = "a name"


def names():
    """What the examples speak of."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = torch.nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    hooked, counted, strided = (torch.nn.Linear(4, 4) for _ in range(3))
    seen = []
    hooked.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    counted.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out))
    strided.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * grad_out[0].is_contiguous(),))
    hooked_weight = torch.nn.Parameter(torch.ones(4, 4))
    hooked_weight.register_hook(lambda grad: None)
    return {
        **NAMES,
        "mesh": mesh,
        "group": mesh.get_group(),
        "layer": torch.nn.Linear(4, 4),
        "replicated": torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)),
        "hooked": hooked,
        "counted": counted,
        "strided": strided,
        "hooked_weight": hooked_weight,
        "checkpoint": checkpoint,
        "visualize_sharding": visualize_sharding,
        "weight": weight,
        "optimizer": torch.optim.SGD([weight], lr=0.1),
        "generator": torch.Generator(),
        "an_object_of_mine": Object(),
        "value": 3,
        "results": [None, None],
        "tensor": torch.ones(4),
    }


def causes_of(body, backend, dynamic=None):
    """Codes of the breaks of a function with that body, compiled on a simulated job of two ranks."""
    source = "def program(x, d):\n" + textwrap.indent(body, "    ") + "\n    return x\n"
    file = "<example>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    torch._dynamo.reset()
    with simulated_job(2, 0), record() as recording:
        space = names()
        exec(compile(source, file, "exec"), space)
        d = distribute_tensor(torch.ones(8, 4), space["mesh"], [Shard(0)])
        with contextlib.suppress(Exception):  # ranks that are not there answer nothing; some causes end the compilation
            torch.compile(space["program"], backend=backend, dynamic=dynamic)(torch.ones(4, 4), d)
    return [cause_of(event).code for event in recording.breaks]


@pytest.mark.parametrize("code", sorted(set(STOCK_CAUSES) - NO_EXAMPLE))
def test_example_breaks_for_its_cause_under_stock(code):
    assert code in causes_of(STOCK_CAUSES[code].example.partition("# instead")[0].strip(), "aot_eager")


@pytest.mark.parametrize("code", sorted(set(CAUSES) - set(ELSEWHERE)))
def test_example_breaks_for_its_cause_here(code, monkeypatch):
    monkeypatch.setattr(DeviceMesh, "a_new_member", lambda mesh: mesh.ndim, raising=False)
    body = PROGRAMS.get(code) or CAUSES[code].example.partition("# instead")[0].strip()
    assert code in causes_of(body, "dtensor_aten", dynamic=True if code == "symbolic-spec" else None)


@pytest.mark.parametrize("code", sorted(code for code in STOCK_CAUSES if STOCK_CAUSES[code].under == "stock"))
def test_what_only_stock_breaks_for_does_not_break_here(code):
    body = STOCK_CAUSES[code].example.partition("# instead")[0].strip()
    assert code not in causes_of(body, "dtensor_aten")


def test_recompile_limit():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    with record() as recording, torch._dynamo.config.patch(recompile_limit=2):
        for n in range(4):
            compiled(torch.ones(n + 2))
    assert [cause_of(event).code for event in recording.breaks][:1] == ["recompile-limit"]
    assert {recompile_cause(c.reason) for c in recording.compilations if c.reason} == {"size"}


def test_error_in_the_compiler():
    def fails(gm, inputs):
        raise ArithmeticError("no kernels today")

    torch._dynamo.reset()
    with record() as recording, pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(lambda x: x * 2, backend=fails)(torch.ones(2))
    (event,) = recording.breaks
    assert event.error and cause_of(event).code == "error-in-compiler" and "no kernels today" in event.message


def test_breaks_of_the_catalogue_of_programs_have_a_cause():
    rows = json.loads((pathlib.Path(__file__).parent / "stock_breaks.json").read_text())
    unknown = [row for row in rows if classify(row["kind"], row["message"]).code == "unknown"]
    assert len(rows) > 90 and len(unknown) <= 0.05 * len(rows), unknown


@pytest.mark.parametrize("code", sorted(CAUSES))
def test_our_own_breaks_are_known_by_their_code(code):
    message = f"{break_title(code)}\n  Explanation: ..."
    assert classify("anything", message).code == code
    assert breaks_under(CAUSES[code]) in ("every backend", "dtensor")


@contextlib.contextmanager
def a_context():
    yield


def branch_on_a_size(x, counts):
    with a_context():
        rows = x.split(counts.tolist())[0]
        return x.sum() if rows.shape[0] == 0 else rows.sum()


def branch_on_a_value(x, counts):
    with a_context():
        return x.sum() if counts.sum() > 0 else x


def function_of_c_code(x, counts):
    with a_context():
        return x + zlib.crc32(b"x")


@pytest.mark.parametrize(
    "program, cause",
    [(branch_on_a_size, "value-of-data"), (branch_on_a_value, "value-of-data"), (function_of_c_code, "c-function")],
)
@pytest.mark.parametrize("backend", ["dtensor_aten", "eager"])
def test_a_break_inside_of_a_context_manager_has_the_cause_of_the_first(program, cause, backend):
    torch._dynamo.reset()
    with record() as recording:
        torch.compile(program, backend=backend)(torch.ones(8, 4), torch.tensor([3, 5]))
    assert {cause_of(event).code for event in recording.breaks} == {cause}


def test_a_break_that_nobody_knows():
    assert classify("a new kind of break", "nothing known").code == "unknown"


def test_codes_are_distinct():
    assert not set(CAUSES) & set(STOCK_CAUSES)


@pytest.mark.parametrize(
    "reason, cause",
    [
        ("0/0: tensor 'x' size mismatch at index 0. expected 4, actual 6", "size"),
        ("0/0: tensor 'x' dtype mismatch. expected Float, actual Double", "dtype"),
        ("0/0: GLOBAL_STATE changed: grad_mode ", "gradient mode"),
        ("0/1: n == 3", "value"),
        ("0/1: len(items) == 2", "number of entries"),
        ("0/1: something new", "other"),
    ],
)
def test_recompile_causes(reason, cause):
    assert recompile_cause(reason) == cause
