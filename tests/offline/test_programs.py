"""Programs as they are written for GPUs, on the emulated one: modules that are moved and cast, data-parallel wrappers, optimizers; and
each of ``tools/bench/configurations.py`` small."""

import importlib.util
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtensor_compile import offline
from dtensor_compile.demo.llama import LlamaConfig

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "bench" / "configurations.py"
spec = importlib.util.spec_from_file_location("configurations", TOOL)
configurations = sys.modules.setdefault("configurations", importlib.util.module_from_spec(spec))
spec.loader.exec_module(configurations)

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("TensorFloat32 tensor cores", "TRITON_DEFAULT_FP_FUSION", "Unable to avoid copying a size")
]

TINY = LlamaConfig(layers=1, dim=64, ffn_dim=192, heads=8, kv_heads=8, vocab=128, sequence=32)


# ---- modules -------------------------------------------------------------------------------------------------------------------


def _is_parameter(value, dtype):
    assert isinstance(value, nn.Parameter) and value.is_leaf and value.requires_grad
    assert value.dtype == dtype and value.device == torch.device("cuda", 0)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.to("cuda", torch.bfloat16)])
@pytest.mark.parametrize("made_on", ["cpu", "cuda"])
def test_a_module_is_moved_and_cast(made_on, cast):
    with offline.device("h100"):
        module = cast(nn.Linear(4, 4, device=made_on).to("cuda"))
        _is_parameter(module.weight, torch.bfloat16)
        module(torch.randn(2, 4, device="cuda", dtype=torch.bfloat16)).sum().backward()
        assert module.weight.grad.dtype == torch.bfloat16
        module.float()
        _is_parameter(module.weight, torch.float32)
        assert module.weight.grad.dtype == torch.float32


def test_parameters_that_are_moved_stay_those_of_ties_and_optimizers():
    with offline.device("h100"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[1].weight = module[0].weight
        module[0].weight.note = "kept"
        before = list(module.parameters())
        module.to("cuda").half()
        assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
        assert module[1].weight is module[0].weight and module[0].weight.note == "kept"
        _is_parameter(module[0].weight, torch.float16)


def test_a_module_goes_to_the_device_and_back():
    with offline.device("h100"):
        module = nn.Linear(4, 4).to("cuda").to("cpu")
        assert type(module.weight) is nn.Parameter and module.weight.device.type == "cpu"
        assert module(torch.ones(4)).tolist()  # it has numbers, whichever they are


def test_a_module_of_dtensors_is_cast():
    with offline.job(8), offline.device("h100"):
        module = fully_shard(nn.Linear(16, 16, device="cuda"), mesh=init_device_mesh("cuda", (8,)))
        module.to(torch.bfloat16)
        assert module.weight.dtype == module.weight.to_local().dtype == torch.bfloat16 and module.weight.to_local().shape == (2, 16)


# ---- wrappers in eager ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", configurations.NAMES)
def test_each_configuration_runs_in_eager(name):
    with offline.job(configurations.RANKS), offline.device("h100"):
        built = configurations.build(name, "cuda", TINY)
        assert built.step().shape == ()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in built.model.parameters())


def test_collectives_of_hooks_have_their_results_in_their_futures():
    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0].div_(8))

    with offline.job(8), offline.device("h100"):
        model = DistributedDataParallel(nn.Linear(4, 4, device="cuda"))
        model.register_comm_hook(None, hook)
        for _ in range(2):
            model(torch.randn(2, 4, device="cuda")).sum().backward()
        assert model.module.weight.grad.shape == (4, 4)


def test_streams_and_events_say_that_all_is_done():
    with offline.device("h100"):
        event = torch.cuda.current_stream().record_event()
        assert event.query() and event.elapsed_time(torch.cuda.Event()) == 0 and torch.cuda.Stream().query()
        torch.cuda.Stream().wait_event(event)


# ---- compiled ------------------------------------------------------------------------------------------------------------------


def compiled(name, config=TINY, **kwargs):
    """The emulated device after a step."""
    with offline.job(configurations.RANKS), offline.device("h100") as device:
        built = configurations.build(name, "cuda", config, **kwargs)
        built.step(lambda f: torch.compile(f, backend="dtensor", fullgraph=True, **built.options))
        assert all(p.grad is not None for p in built.model.parameters())
    return device


SLOW = {name for name in configurations.CONFIGURATIONS if name.endswith("dynamic")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in configurations.CONFIGURATIONS]
)
def test_each_configuration_compiles_to_two_graphs(name):
    forward, backward = compiled(name).graphs
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.kernels and backward.kernels and backward.source.count("def call(") == 1
    for graph in (forward, backward):
        starts = [step.number for step in graph.steps if step.kind == "start"]
        assert sorted(step.number for step in graph.steps if step.kind == "wait") == starts
    assert sum(step.kind == "start" for step in backward.steps) > 0
