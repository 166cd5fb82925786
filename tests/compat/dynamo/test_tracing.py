"""Our trackers are in place while Dynamo traces for our backend, and torch is as it was at all other times."""

import functools
import gc
import json
import operator
import pathlib
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import CompilationCallbackHandler
from torch._dynamo.comptime import comptime
from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder
from torch.distributed.tensor import Shard

from dtensor_compile.backend import dtensor
from dtensor_compile.compat.dynamo import left_to_python, tracing
from dtensor_compile.compat.dynamo.left_to_python import leave_code_to_python
from dtensor_compile.compat.dynamo.tracing import install_while_tracing, installed_backends
from dtensor_compile.compat.dynamo.trackers.opaque_trackers import OpaqueVariable
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Entries
from dtensor_compile.graph.runner import GraphStep
from dtensor_compile.stages import program
from dtensor_compile.testing import make_mesh, on_ranks
from dtensor_compile.variables import DeviceMeshVariable, install_trackers

seen = []


def _tables():
    """What Dynamo looks trackers up in."""
    return {
        "factory": vars(OpaqueVariable)["create"],
        "by type": dict(VariableBuilder._type_dispatch()),
        "by id": dict(VariableBuilder._id_dispatch()),
        "made while tracing": dict(SourcelessBuilder._type_handlers),
    }


def _look(ctx):
    """Runs while Dynamo traces `_program`."""
    tracker = ctx.get_local("mesh")._ComptimeVar__variable.realize()
    seen.append((installed_backends(), _tables(), isinstance(tracker, DeviceMeshVariable)))


def _program(x, mesh):
    comptime(_look)
    return x @ x, mesh.size()


def _trace(backend, **options):
    """What `_look` saw while `backend` compiled `_program`."""
    torch._dynamo.reset()
    seen.clear()
    torch.compile(_program, backend=backend, fullgraph=True, **options)(torch.eye(2), make_mesh((1,)))
    assert len(seen) == 1
    return seen[0]


@pytest.mark.parametrize("how", ["name", "name and options", "function", "partial"])
@on_ranks(1)
def test_trackers_are_in_place_while_our_backend_traces(how):
    backend = {"function": dtensor, "partial": functools.partial(dtensor, options={"strict": True})}.get(how, "dtensor")
    before = _tables()
    installed, tables, ours = _trace(backend, **({"options": {"strict": True}} if how == "name and options" else {}))
    assert installed == [dtensor] and ours
    assert tables["factory"] is not before["factory"]
    assert tables["by id"].keys() - before["by id"].keys() >= {id(Shard)}
    assert _tables() == before and not installed_backends()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@on_ranks(1)
def test_tables_are_torchs_own_while_another_backend_traces(backend):
    before = _tables()
    _trace("dtensor")
    installed, tables, ours = _trace(backend)
    assert installed == [] and not ours
    assert tables == before


@on_ranks(1)
def test_another_backend_that_traces_inside_our_compilation_gets_torchs_trackers():
    def inner(x, mesh):
        comptime(_look)
        return x + 1, mesh.size(), Shard(mesh.ndim)

    def compile_another(gm):
        assert torch.compile(inner, backend="eager", fullgraph=True)(torch.ones(1), make_mesh((1,)))[1:] == (
            1,
            Shard(1),
        )

    torch._dynamo.reset()
    seen.clear()
    with mock.patch.object(program, "ALWAYS", (GraphStep(compile_another, required=True),)):
        torch.compile(_program, backend="dtensor", fullgraph=True)(torch.eye(2), make_mesh((1,)))
    assert [ours for _, _, ours in seen] == [True, False]
    assert not installed_backends()


class _Stop(Exception):
    pass


def _fail(ctx):
    raise _Stop


@on_ranks(1)
def test_an_error_while_tracing_takes_the_trackers_out():
    def fails_to_trace(x):
        comptime(_fail)
        return x @ x

    def cannot_be_traced(x):
        torch._dynamo.graph_break()
        return x @ x

    before = _tables()
    for function, options in ((fails_to_trace, {}), (cannot_be_traced, {}), (lambda x: x @ x, {"strict": "no bool"})):
        torch._dynamo.reset()
        with pytest.raises(Exception):  # noqa: B017 - which one is Dynamo's business
            torch.compile(function, backend="dtensor", fullgraph=True, options=options)(torch.eye(2))
        assert _tables() == before and not installed_backends()


@on_ranks(1)
def test_trackers_survive_a_reset_of_dynamo():
    run = torch.compile(_program, backend="dtensor", fullgraph=True)
    for _ in range(3):
        held = gc.get_objects()  # as a debugger or a leak test does
        torch._dynamo.reset()
        seen.clear()
        run(torch.eye(2), make_mesh((1,)))
        assert [ours for _, _, ours in seen] == [True] and held


@on_ranks(1)
def test_trackers_are_in_place_while_another_thread_compiles_a_backward():
    begun, end = threading.Event(), threading.Event()

    def compile_backward(graph, inputs):
        begun.set()
        assert end.wait(60)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=compile_backward
    )
    x = torch.ones(2, requires_grad=True)
    other = threading.Thread(target=lambda: torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward())
    other.start()
    try:
        assert begun.wait(60)
        seen.clear()
        torch.compile(_program, backend="dtensor", fullgraph=True)(torch.eye(2), make_mesh((1,)))
        assert [ours for _, _, ours in seen] == [True] and not installed_backends()
    finally:
        end.set()
        other.join()
    assert torch.equal(x.grad, torch.ones(2).cos())


@on_ranks(1)
def test_installing_again_changes_nothing():
    around = CompilationCallbackHandler.install_callbacks
    install_trackers(dtensor)
    install_while_tracing(dtensor, Entries({}, {}, ()))
    assert CompilationCallbackHandler.install_callbacks is around


# ---- processes of their own: what a process looks like before and after us -----------------------------------------

_SETUP = """
import sys, json, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
from torch.distributed.tensor import DTensor, Replicate, Shard
mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

def program(x, w):
    tp = mesh["tp"]
    a, b = DTensor.from_local(x, tp, [Shard(0)]), DTensor.from_local(w, tp, [Replicate()])
    return (a @ b).redistribute(tp, [Replicate()]).to_local().relu() * tp.size(), a.placements

def step(backend, **options):
    torch._dynamo.reset()
    x, w = torch.eye(4, requires_grad=True), torch.eye(4, requires_grad=True)
    out, _ = torch.compile(program, backend=backend, fullgraph=True, options=options)(x, w)
    out.sum().backward()
"""

_ATTRIBUTES = """
import types
def attributes():
    # Functions, classes and what classes hold, of all modules of torch, by identity. Left out: plain data (counters,
    # caches of results), and namespaces of torch.ops, which fill as operators are looked up, and where ours is
    # registered.
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or type(module) is not types.ModuleType:
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                members = [(k, v) for k, v in vars(value).items() if callable(v) or hasattr(v, "__get__")]
                found.update((f"{value.__module__}.{value.__qualname__}.{k}", v) for k, v in members)
    return found

def tables():
    from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder
    import torch._dynamo.config, torch._inductor.config, torch._functorch.config
    return {
        "by type": dict(VariableBuilder._type_dispatch()),
        "by id": dict(VariableBuilder._id_dispatch()),
        "made while tracing": dict(SourcelessBuilder._type_handlers),
        "dynamo config": torch._dynamo.config.get_config_copy(),
        "inductor config": torch._inductor.config.get_config_copy(),
        "functorch config": torch._functorch.config.get_config_copy(),
    }

step("inductor")  # what torch sets up at its first compilation
step("aot_eager")
modules, before, tables_before = set(sys.modules), attributes(), tables()
step("dtensor")
missing = object()
after, tables_after = attributes(), tables()
assert "dtensor_compile" in set(sys.modules) - modules
differing = [
    name for name in {**before, **after}
    if before.get(name, missing) is not after.get(name, missing)
    and (name in before or name.rpartition(".")[0] in modules)
]
differing += [name for name in tables_before if tables_before[name] != tables_after[name]]
print(json.dumps([len(before), sorted(differing)]))
"""

_GRAPHS = """
import re
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

class Record(CustomGraphPass):
    def __init__(self): self.graphs = []
    def __call__(self, graph): self.graphs.append(graph.python_code("self").src)
    def uuid(self): return None

def inductor():
    record = Record()
    with torch._inductor.config.patch(force_disable_caches=True, post_grad_custom_post_pass=record):
        _, code = run_and_get_code(lambda: step("inductor"))
    return record.graphs, [re.sub("# AOT ID: .*", "", text) for text in code]  # the ID counts compilations

inductor()
before = inductor()
step("dtensor")
assert "dtensor_compile" in sys.modules
print(json.dumps([before, inductor()]))
"""


def _run(script):
    """Runs a script in a process of its own and returns what it prints last."""
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _SETUP + script], capture_output=True, check=False, text=True, cwd=root, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_no_attribute_of_torch_differs_after_a_step_through_our_backend():
    compared, differing = _run(_ATTRIBUTES)
    assert compared > 10_000
    assert sorted(differing) == [  # the lasting patches, which hand over to torch where another backend compiles
        "torch._dynamo.callback.CompilationCallbackHandler.install_callbacks",
        "torch._dynamo.convert_frame._compile",
    ]


def _helper(x):
    return _inner(x) + 1


def _inner(x):
    return x.sin()


@torch._dynamo.disable(recursive=False)
def _runs_in_python(x):
    return _helper(x)


def _calls_it(x):
    return _runs_in_python(x)


@on_ranks(1)
def test_frames_that_we_leave_to_python_are_compiled_by_other_backends():
    """Nothing is noted on the code: our backend is first, and what it leaves alone another one takes."""
    names = []

    def backend(gm, inputs):
        names.append({node.target for node in gm.graph.nodes if node.op in ("call_function", "call_method")})
        return gm.forward

    x = torch.ones(2)
    with (
        mock.patch.multiple(left_to_python, _left=set(), _left_if=[]),
        mock.patch.multiple(tracing, _scopes=[*tracing._scopes]),
    ):
        install_while_tracing(backend, Entries({}, {}, ()))
        leave_code_to_python(_helper.__code__.__eq__)
        for compiler, expected in (
            (backend, [{"sin"}]),
            (lambda gm, inputs: backend(gm, inputs), [{"sin", operator.add}]),
        ):
            torch._dynamo.reset()
            names.clear()
            for _ in range(2):
                torch.testing.assert_close(torch.compile(_calls_it, backend=compiler)(x), x.sin() + 1)
            assert names == expected


@pytest.mark.slow
def test_inductor_makes_the_same_graphs_and_code_before_and_after_us():
    before, after = _run(_GRAPHS)
    assert len(before[0]) == 2 and len(before[1]) == 2  # forward and backward
    assert before == after
