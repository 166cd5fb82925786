"""Programs as they are written for GPUs, on the emulated one: modules that are moved and cast, data-parallel wrappers,
optimizers; and each of ``tools/bench/configurations.py`` small."""

import importlib.util
import pathlib
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtensor_compile import offline
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import tensor_parallel
from tests.cases import mostly_slow

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "bench" / "configurations.py"
spec = importlib.util.spec_from_file_location("configurations", TOOL)
configurations = sys.modules.setdefault("configurations", importlib.util.module_from_spec(spec))
spec.loader.exec_module(configurations)

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("TensorFloat32 tensor cores", "TRITON_DEFAULT_FP_FUSION", "Unable to avoid copying a size")
]

TINY = LlamaConfig(layers=1, dim=64, ffn_dim=192, heads=8, kv_heads=8, vocab=128, sequence=32)


# ---- modules -------------------------------------------------------------------------------------------------------


def _is_parameter(value, dtype):
    assert isinstance(value, nn.Parameter) and value.is_leaf and value.requires_grad
    assert value.dtype == dtype and value.device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.to("cuda", torch.bfloat16)]
)
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
        assert (
            module.weight.dtype == module.weight.to_local().dtype == torch.bfloat16
            and module.weight.to_local().shape == (2, 16)
        )


# ---- wrappers in eager ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_slow(configurations.NAMES, *configurations.CONFIGURATIONS))
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


OPTIMIZERS = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


SHARDED, PLAIN = "fully_shard x tensor parallel: mixed precision", "DDP: plain"


# torch has no sharding rule for fused SGD, on a GPU neither.
@pytest.mark.parametrize(
    "name, optimizer",
    mostly_slow(
        [(n, o) for n in (SHARDED, PLAIN) for o in OPTIMIZERS if (n, o) != (SHARDED, "SGD fused")],
        (SHARDED, "AdamW foreach"),
        (PLAIN, "SGD fused"),
    ),
)
def test_optimizers_step_in_eager_after_clipping(name, optimizer):
    with offline.job(configurations.RANKS), offline.device("h100"):
        built = configurations.build(name, "cuda", TINY)
        stepper = OPTIMIZERS[optimizer](built.model.parameters())
        for _ in range(2):
            built.step()
            nn.utils.clip_grad_norm_(built.model.parameters(), 1.0)
            stepper.step()
            stepper.zero_grad()
        states = [value for state in stepper.state.values() for value in state.values() if value.dim()]
        assert len(states) >= len(list(built.model.parameters())) and all(
            value.device.type == "cuda" for value in states
        )


# ---- compiled ------------------------------------------------------------------------------------------------------


def compiled(name, config=TINY, **kwargs):
    """The emulated device after a step."""
    with offline.job(configurations.RANKS), offline.device("h100") as device:
        built = configurations.build(name, "cuda", config, **kwargs)
        built.step(lambda f: torch.compile(f, backend="dtensor", fullgraph=True, **built.options))
        assert all(p.grad is not None for p in built.model.parameters())
    return device


@pytest.mark.slow
@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_each_configuration_compiles_to_two_graphs(name):
    forward, backward = compiled(name).graphs
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.kernels and backward.kernels and backward.source.count("def call(") == 1
    for graph in (forward, backward):
        starts = [step.number for step in graph.steps if step.kind == "start"]
        assert (
            sorted({step.number for step in graph.steps if step.kind == "wait"}) == starts
        )  # a bucket is waited for by tensor
    assert sum(step.kind == "start" for step in backward.steps) > 0


@pytest.mark.slow
def test_clipping_and_an_optimizer_step_are_one_graph_more():
    with offline.job(configurations.RANKS), offline.device("h100") as device:
        built = configurations.build("fully_shard: mixed precision", "cuda", TINY)
        optimizer = torch.optim.AdamW(built.model.parameters())

        @torch.compile(backend="dtensor")
        def update():
            nn.utils.clip_grad_norm_(built.model.parameters(), 1.0)
            optimizer.step()

        built.step(lambda f: torch.compile(f, backend="dtensor", fullgraph=True))
        update()
    _, _, updates = device.graphs
    assert [step.name for step in updates.steps if step.kind == "start"] == [
        "all_reduce_"
    ]  # of the squares of the norm
    assert updates.kernels


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD foreach", "SGD fused"])
def test_steps_of_optimizers_compile(optimizer):
    with offline.job(configurations.RANKS), offline.device("h100") as device:
        built = configurations.build("fully_shard x tensor parallel: plain", "cuda", TINY)
        stepper = OPTIMIZERS[optimizer](built.model.parameters())
        step = torch.compile(stepper.step, backend="dtensor")
        for _ in range(2):
            built.step()
            step()
    assert device.graphs and not any(step.kind == "start" for graph in device.graphs for step in graph.steps)


@pytest.mark.slow
def test_checkpoint_wrapper_under_autocast():
    with offline.job(8), offline.device("h100") as device:
        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
        model = tensor_parallel(Llama(TINY).to("cuda"), mesh["tp"])
        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        tokens = torch.zeros(2, TINY.sequence, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.compile(lambda x: model(x).square().mean(), backend="dtensor", fullgraph=True)(tokens)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
    forward, backward = device.graphs
    assert "bfloat16" in forward.source
    attention = [step.name for step in backward.steps if "attention" in step.name or "rng" in step.name]
    assert [name for name in attention if "triton" not in name] == [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HSDP: plain", "replicate (DDP): plain"])
def test_a_root_whose_hooks_run_in_eager(name):
    with offline.job(configurations.RANKS), offline.device("h100") as device:
        built = configurations.build(name, "cuda", TINY)
        compiled = torch.compile(built.model, backend="dtensor")
        for _ in range(2):
            compiled(built.inputs[0][0]).sum().backward()
        assert all(p.grad is not None for p in built.model.parameters())
    assert [graph.direction for graph in device.graphs] == ["forward", "backward"]


@pytest.mark.slow
def test_shapes_of_llama_8b_on_256_ranks():
    config = configurations.LLAMA_8B
    with offline.job(256), offline.device("h100") as device:
        built = configurations.build(
            "fully_shard x tensor parallel: mixed precision", "cuda", config, mesh_shape=(32, 8)
        )
        built.step(lambda f: torch.compile(f, backend="dtensor", fullgraph=True))
        weight = built.model.output.weight
        assert weight.shape == (128256, 4096) and weight.grad.to_local().shape == (128256 // 256, 4096)
    forward, backward = device.graphs
    assert any("bfloat16" in step.sends for step in forward.steps if step.kind == "start")
    assert any("float32" in step.sends for step in backward.steps if step.kind == "start")  # gradients


class Heads(nn.Module):
    """Rows in heads of a size that is an attribute, scaled by a table that is a buffer."""

    def __init__(self):
        super().__init__()
        self.head, self.linear = 4, nn.Linear(16, 16)
        self.register_buffer("table", torch.ones(16, 4))

    def forward(self, x):
        return (self.linear(x).unflatten(-1, (-1, self.head)) * self.table[: x.size(0)].unsqueeze(1)).softmax(-1)


@pytest.mark.slow
def test_ints_and_buffers_of_sharded_modules_are_static_where_inputs_are_dynamic():
    with offline.job(8), offline.device("h100") as device:
        module = Heads().to("cuda")
        fully_shard(module, mesh=init_device_mesh("cuda", (8,)))
        compiled = torch.compile(lambda x: module(x), backend="dtensor", dynamic=True, fullgraph=True)
        for rows in (8, 12):
            assert compiled(torch.randn(rows, 16, device="cuda")).shape == (rows, 4, 4)
        module.head = 8
        module.table = torch.ones(16, 8, device="cuda")
        assert compiled(torch.randn(12, 16, device="cuda")).shape == (12, 2, 8)
    forwards = [graph.source for graph in device.graphs if graph.direction == "forward"]
    assert len(forwards) == 2  # one for each size of heads
    assert all(len(set(re.findall(r"\bs\d+\b", source))) == 1 for source in forwards)  # the number of rows
