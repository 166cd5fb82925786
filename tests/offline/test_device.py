"""The emulated device: what is compiled for it, what a run of it says, and that torch is as it was afterwards."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile import offline, record
from dtensor_compile.errors import OfflineError, TopologyError
from dtensor_compile.topology.files import find_gpu
from dtensor_compile.topology.gpus import GPUS

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}") for text in ("TensorFloat32 tensor cores", "TRITON_DEFAULT_FP_FUSION")
]


def test_a_fused_softmax_reaches_machine_code():
    with offline.device("h200") as device:
        x = torch.randn(64, 256, device="cuda")
        out = torch.compile(lambda x: x.softmax(-1))(x)
    assert out.device == torch.device("cuda", 0) and out.shape == (64, 256)
    (kernel,) = device.kernels
    assert_expected_inline(
        device.graphs[0].order(), """kernel   triton_per_fused__softmax_prepare_softmax_online_0\n"""
    )
    assert ".target sm_90a" in kernel.binary.ptx and kernel.binary.cubin.startswith(b"\x7fELF")
    assert "multi_processor_count=132" in kernel.source and kernel.source in device.graphs[0].source
    assert kernel.binary.registers > 0 and kernel.binary.shared > 0 and kernel.binary.spills == 0


def test_a_tensor_parallel_mlp_forward_and_backward():
    with offline.job(8), offline.device("h200") as device:
        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to("cuda")
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        compiled = torch.compile(model, backend="dtensor", fullgraph=True)
        for _ in range(2):
            compiled(torch.randn(8, 64, device="cuda")).sum().backward()
        assert model[0].weight.grad.to_local().shape == (32, 64)
    forward, backward = device.graphs
    assert_expected_inline(
        forward.order(),
        """\
operator addmm
kernel   triton_poi_fused_gelu_0
kernel   triton_poi_fused_redistribute_1
operator addmm
start    all_reduce_ #0 float32[8, 64]
wait     all_reduce_ #0
""",
    )
    assert_expected_inline(
        backward.order(),
        """\
operator mm
operator mm
kernel   triton_per_fused_sum_0
kernel   triton_per_fused_gelu_gelu_backward_sum_1
operator mm
""",
    )
    assert (forward.direction, backward.direction) == ("forward", "backward")
    print(device.table())
    assert device.table().splitlines()[0] == "NVIDIA H200, sm_90"
    assert [line.split()[0] for line in device.table().splitlines()[2:]] == [kernel.name for kernel in device.kernels]


def test_what_is_not_on_the_device_is_real():
    before = torch.cuda.is_available()
    with offline.device("a100") as device:
        assert (
            torch.cuda.is_available()
            and torch.cuda.get_device_capability() == (8, 0)
            and torch.cuda.device_count() == 8
        )
        assert torch.cuda.get_device_name() == device.gpu.name
        x = torch.arange(4.0)
        assert (x @ x).item() == 14
        assert (x.cuda() + 1).device.type == "cuda"
        assert x.pin_memory().tolist() == [0, 1, 2, 3]
        with pytest.raises(Exception, match="data-dependent|DataDependent|_local_scalar_dense"):
            x.cuda().sum().item()
    assert torch.cuda.is_available() == before


def test_attention_takes_the_kernel_of_the_device():
    def kernels(dtype, mask=None, **shape):
        with offline.device("h100") as device:
            q = torch.randn(2, 4, 64, 64, device="cuda", dtype=dtype, requires_grad=True)
            mask = None if mask is None else torch.ones(64, 64, device="cuda", dtype=dtype)
            out = torch.compile(nn.functional.scaled_dot_product_attention)(q, q, q, mask)
            out.sum().backward()
        return [step.name for graph in device.graphs for step in graph.steps if "attention" in step.name]

    flash, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    if torch.cuda.is_available():
        pytest.skip("beside a real GPU torch itself chooses, and where it has cuDNN it may take cuDNN's kernels")
    assert kernels(torch.bfloat16) == [flash, flash + "_backward"]
    assert kernels(torch.float32) == [efficient, efficient + "_backward"]
    assert kernels(torch.bfloat16, mask=True) == [efficient, efficient + "_backward"]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_what_would_be_measured_or_captured_is_left_out(mode):
    with offline.device("h200") as device:
        w, x = torch.randn(128, 128, device="cuda"), torch.randn(128, 128, device="cuda")
        compiled = torch.compile(lambda w, x: (x @ w).sin(), mode=mode)
        for _ in range(3):
            assert compiled(w, x).shape == (128, 128)
    assert [step.kind for step in device.graphs[0].steps] == ["operator", "kernel"]


def test_sizes_that_vary_and_a_rank_without_rows():
    with offline.job(4, rank=3), offline.device("h200") as device:
        mesh = init_device_mesh("cuda", (4,))
        gather = torch.compile(
            lambda x: (
                DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local().softmax(-1)
            ),
            backend="dtensor",
        )
        for rows in (8, 12, 20):
            x = torch.randn(rows, 64, device="cuda", requires_grad=True)
            out = gather(x)
            out.sum().backward()
            assert out.shape == (4 * rows, 64) and x.grad.shape == (rows, 64)
        sizes = [graph.steps[0].sends for graph in device.graphs if graph.direction == "forward"]
        assert sizes == ["float32[8, 64]", "float32[20, 64]"]  # the second graph is for all sizes, and ran last for 20
        w = distribute_tensor(torch.randn(3, 8, device="cuda"), mesh, [Shard(0)]).requires_grad_()
        step = torch.compile(
            lambda w, x: x @ w.redistribute(placements=[Replicate()]).to_local().sin(), backend="dtensor"
        )
        step(w, torch.randn(2, 3, device="cuda")).sum().backward()
        assert w.to_local().shape == w.grad.to_local().shape == (0, 8)


def test_optimizers_dropout_and_fully_shard():
    with offline.job(8), offline.device("h200") as device:
        mesh = init_device_mesh("cuda", (8,))
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64)).cuda()
        fully_shard(model, mesh=mesh)
        torch.compile(model, backend="dtensor", fullgraph=True)(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        torch.compile(optimizer.step, backend="dtensor")()
        x = distribute_tensor(torch.randn(128, 128, device="cuda"), mesh, [Shard(0)])
        torch.compile(lambda x: nn.functional.dropout(x.sin(), 0.3).to_local(), backend="dtensor", fullgraph=True)(x)
    forward, backward, step, dropped = device.graphs
    assert sum(s.kind == "start" for s in forward.steps) == sum(s.kind == "start" for s in backward.steps) == 1
    assert {s.kind for s in step.steps} == {"kernel"}  # updates of all parameters, in a few kernels
    assert any("rng" in s.name or "rand" in s.name or "dropout" in s.name for s in dropped.steps)


def test_an_error_inside_leaves_nothing_behind():
    before = torch.cuda.is_available()
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            with offline.device("h200"):
                torch.compile(lambda x: x * torch.full((3,), 2.0, device="cuda"))(torch.ones(3, device="cuda"))
                raise error
        assert torch.cuda.is_available() == before
        if before:
            assert torch.ones(1, device="cuda").item() == 1
            continue
        with pytest.raises((AssertionError, RuntimeError), match="not compiled with CUDA|no NVIDIA driver"):
            torch.ones(1, device="cuda")


_SETUP = """
import json, sys, warnings
import torch
import torch._functorch.config, torch._inductor.config
from torch._inductor.utils import run_and_get_code
warnings.simplefilter("ignore")

def step(device):
    torch._dynamo.reset()
    x, w = torch.ones(16, 32, device=device, requires_grad=True), torch.ones(32, 32, device=device, requires_grad=True)
    out = torch.compile(lambda x, w: torch.relu(x @ w).softmax(-1))(x, w)
    out.sum().backward()
"""

_CODE = """
import re
def code():
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        return [re.sub("# AOT ID: .*|/tmp/[^ ]*", "", text) for text in run_and_get_code(lambda: step("cpu"))[1]]

code()
before = code()
from dtensor_compile import offline
with offline.device("h200") as device:
    step("cuda")
assert len(device.kernels) == 2
after = code()
assert len(before) == 2
print(json.dumps(before == after))
"""

_STATE = """
import functools, types
def attributes():
    # Functions, classes and what classes hold, of all modules of torch and Triton, by identity; dicts of classes by
    # their keys.
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("torch", "triton") or type(module) is not types.ModuleType:
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__.split(".")[0] in ("torch", "triton"):
                members = [(k, v) for k, v in vars(value).items() if callable(v) or hasattr(v, "__get__")]
                found.update((f"{value.__module__}.{value.__qualname__}.{k}", v) for k, v in members)
    return found

def state():
    import os
    from torch._dynamo.device_interface import device_interfaces
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.fx_passes import joint_graph
    from torch.utils._triton import has_triton
    from triton.runtime.driver import driver
    import torch._dynamo.config, torch._inductor.config, torch._functorch.config
    return {
        "interfaces": dict(device_interfaces),
        "loaded": list(map(id, PyCodeCache.modules)),
        "modules": sorted(name for name in sys.modules if "compile_tasks." in name),
        "patterns": {str(key): len(value) for key, value in joint_graph.patterns.patterns.items()},
        "driver": [driver._active, driver._default],
        "triton": has_triton(),
        "environment": dict(os.environ),
        "threads": torch._C._is_multithreading_enabled(),
        "modes": torch.utils._python_dispatch._len_torch_dispatch_stack(),
        "cuda": [
            torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_initialized(),
            str(torch.accelerator.current_accelerator()),
        ],
        "dynamo config": torch._dynamo.config.get_config_copy(),
        "inductor config": torch._inductor.config.get_config_copy(),
        "functorch config": torch._functorch.config.get_config_copy(),
    }

from dtensor_compile import offline
with offline.device("a100"):  # what torch and Triton set up at their first compilation
    step("cuda")
step("cpu")
modules, before, state_before = set(sys.modules), attributes(), state()
with offline.device("h200"):
    step("cuda")
missing = object()
after, state_after = attributes(), state()
differing = [
    name for name in {**before, **after}
    if before.get(name, missing) is not after.get(name, missing)
    and (name in before or name.rpartition(".")[0] in modules)
]
differing += [name for name in state_before if state_before[name] != state_after[name]]
print(json.dumps([len(before), sorted(differing)]))
"""


def _run(script):
    """Runs a script in a process of its own and returns what it prints last."""
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _SETUP + script], capture_output=True, text=True, cwd=root, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_inductor_makes_the_same_code_for_a_cpu_before_and_after():
    assert _run(_CODE) is True


@pytest.mark.slow
def test_nothing_of_torch_or_triton_differs_afterwards():
    compared, differing = _run(_STATE)
    assert compared > 10_000
    assert differing == []


# ---- bad input -----------------------------------------------------------------------------------------------------


def test_an_unknown_device_is_an_error_that_lists_the_known():
    with pytest.raises(
        TopologyError,
        match="GPU 'h20' is neither a file nor a preset; did you mean 'h200'. presets: a100, h100, h200, b200",
    ):
        with offline.device("h20"):
            raise AssertionError("entered")


def test_a_device_from_a_file(tmp_path):
    file = tmp_path / "l40s.toml"
    file.write_text(
        'name = "L40S"\ncapability = "8.9"\nmultiprocessors = 142\nbytes = 48_000_000_000\n'
        "shared_memory = 101_376\nl2 = 100_663_296\n"
        "threads = 1536\n[device]\nmemory = 864e9\nlaunch = 5e-6\npeak = {2 = 362e12, 4 = 183e12}\n"
    )
    with offline.device(file) as device:
        torch.compile(lambda x: x + 1)(torch.ones(8, device="cuda"))
    (kernel,) = device.kernels
    assert device.gpu.architecture == "sm_89" and ".target sm_89" in kernel.binary.ptx
    assert "multi_processor_count=142" in kernel.source and device.gpu.device.memory == 864e9


@pytest.mark.parametrize(
    "values, message",
    [
        ({"capability": "9.0"}, "keys of a GPU are bytes, capability, l2, multiprocessors, shared_memory"),
        ({"capability": "sm_90"}, 'capability is a compute capability such as "9.0"'),
        ({"multiprocessors": 0}, "multiprocessors is a number above zero"),
        ({"multiprocessors": 1.5}, "multiprocessors is a whole number"),
        ({"cores": 1}, "given: .*cores"),
    ],
)
def test_a_file_that_says_something_else_is_an_error(tmp_path, values, message):
    known = {"capability": "9.0", "multiprocessors": 1, "bytes": 1, "shared_memory": 1, "l2": 1}
    file = tmp_path / "g.json"
    file.write_text(json.dumps(values if values == {"capability": "9.0"} else {**known, **values}))
    with pytest.raises(TopologyError, match=message):
        find_gpu(file)


def test_one_device_at_a_time():
    before = torch.cuda.is_available()
    with offline.device("h200"):
        with pytest.raises(OfflineError, match="leave that context first"):
            with offline.device("a100"):
                raise AssertionError("entered")
        assert torch.cuda.get_device_name() == GPUS["h200"].name
    assert torch.cuda.is_available() == before


def test_without_triton_it_is_said_what_to_install_and_what_works(monkeypatch):
    before = torch.cuda.is_available()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(OfflineError, match=r'pip install "dtensor-compile\[triton\]".*report and explain') as raised:
        with offline.device("h200"):
            raise AssertionError("entered")
    assert "CPU" in str(raised.value)
    assert torch.cuda.is_available() == before


def test_a_kernel_that_does_not_compile_leaves_its_graph_to_operators(tmp_path):
    file = tmp_path / "small.json"
    file.write_text(
        json.dumps({"capability": "9.0", "multiprocessors": 1, "bytes": 1 << 30, "shared_memory": 4, "l2": 1 << 20})
    )
    with offline.job(2), offline.device(file) as device, record() as recording:
        x = DTensor.from_local(
            torch.randn(64, 256, device="cuda"), init_device_mesh("cuda", (2,)), [Shard(0)]
        ).requires_grad_()
        with pytest.warns(UserWarning, match="a kernel of the backward graph does not compile"):
            out = torch.compile(lambda x: x.softmax(-1).to_local(), backend="dtensor", fullgraph=True)(x)
            out.sum().backward()
        assert x.grad.to_local().shape == (64, 256) and device.graphs == []
    decisions = [d for d in recording.report().ours.decisions if d.kind == "uncompiled_kernels"]
    assert len(decisions) == 2 and {(d.before, d.after) for d in decisions} == {("inductor", "aten")}
    assert "out of resource: shared memory, Required: 8, Hardware limit: 4" in decisions[0].reason


def test_a_kernel_that_does_not_compile_is_an_error_under_strict(tmp_path):
    file = tmp_path / "small.json"
    file.write_text(
        json.dumps({"capability": "9.0", "multiprocessors": 1, "bytes": 1 << 30, "shared_memory": 4, "l2": 1 << 20})
    )
    with offline.job(2), offline.device(file):
        x = DTensor.from_local(torch.randn(64, 256, device="cuda"), init_device_mesh("cuda", (2,)), [Shard(0)])
        with pytest.raises(Exception, match="fits: out of resource: shared memory"):
            torch.compile(lambda x: x.softmax(-1), backend="dtensor", options={"strict": True})(x)
    with offline.device(file), pytest.raises(Exception, match="fits: out of resource: shared memory"):  # stock raises
        torch.compile(lambda x: x.softmax(-1))(torch.randn(64, 256, device="cuda"))


def test_a_rank_that_is_not_there():
    with pytest.raises(OfflineError, match="8 is no rank of a job of 8 ranks"):
        with offline.job(8, rank=8):
            raise AssertionError("entered")


def test_draws_of_dtensors_are_as_before_afterwards():
    """DTensor keeps the tracker of the first mesh that draws."""

    def draw(device, run):
        mesh = init_device_mesh(device, (2,), mesh_dim_names=("dp",))
        return run(DTensor.from_local(torch.ones(2, 4, device=device), mesh, [Shard(0)]))

    def dropped(x):
        return torch.nn.functional.dropout(x, 0.5)

    with offline.job(2):
        with offline.device("h100"):
            draw("cuda", torch.compile(dropped, backend="dtensor"))
        assert draw("cpu", dropped).to_local().shape == (2, 4)
