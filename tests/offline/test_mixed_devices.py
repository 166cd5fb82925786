"""Host memory and an emulated GPU in one program: parameters in host memory, pinned batches, autocast, float8, meta."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile import offline

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}") for text in ("TensorFloat32 tensor cores", "TRITON_DEFAULT_FP_FUSION")
]


def mlp(mesh, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to("cuda", dtype)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def names(graph):
    return [step.name for step in graph.steps]


def sends(graph):
    return [f"{step.name} {step.sends}" for step in graph.steps if step.kind == "start"]


def test_parameters_kept_in_host_memory_are_copied_and_gathered():
    with offline.job(8), offline.device("h200") as device:
        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))
        local = torch.randn(8, 64, requires_grad=True)  # this rank's shard, real and in host memory

        def step(local, x):
            shard = DTensor.from_local(local.to("cuda", non_blocking=True), mesh, [Shard(0)])
            return x @ shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        out = torch.compile(step, backend="dtensor", fullgraph=True)(local, torch.randn(4, 64, device="cuda"))
        out.sum().backward()
    assert out.device.type == "cuda" and out.shape == (4, 64)
    assert local.grad.device.type == "cpu" and local.grad.shape == (8, 64)
    forward, backward = device.graphs
    assert names(forward) == ["copy_", "all_gather_into_tensor", "all_gather_into_tensor", "mm"]
    assert names(backward)[-3:] == ["reduce_scatter_tensor", "reduce_scatter_tensor", "copy_"]


def test_a_pinned_batch_is_copied_inside_and_outside():
    with offline.job(2), offline.device("h200") as device:
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
        model = mlp(mesh)
        batch = torch.randn(8, 64).pin_memory()
        outside = torch.compile(model, backend="dtensor", fullgraph=True)(batch.to("cuda", non_blocking=True))
        inside = torch.compile(lambda x: model(x.to("cuda", non_blocking=True)), backend="dtensor", fullgraph=True)(
            batch
        )
    assert outside.device == inside.device == torch.device("cuda", 0)
    assert len(device.graphs[-1].steps) > len(device.graphs[0].steps)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast_computes_products_in_bfloat16(where):
    with offline.job(2), offline.device("h200") as device:
        model = mlp(init_device_mesh("cuda", (2,), mesh_dim_names=("tp",)))

        def under(x):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return model(x)

        x = torch.randn(8, 64, device="cuda")
        if where == "inside":
            out = torch.compile(under, backend="dtensor", fullgraph=True)(x)
        else:
            compiled = torch.compile(model, backend="dtensor", fullgraph=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = compiled(x)
        out.float().sum().backward()
        assert out.dtype == torch.bfloat16 and model[0].weight.grad.dtype == torch.float32
    assert any("_to_copy" in name for graph in device.graphs for name in names(graph))


def test_bfloat16_parameters_with_sums_in_float32():
    with offline.job(8), offline.device("h200") as device:
        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))
        w = DTensor.from_local(
            torch.randn(8, 64, device="cuda", dtype=torch.bfloat16), mesh, [Shard(0)]
        ).requires_grad_()

        def step(w, x):
            return x @ w.float().redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).bfloat16()

        torch.compile(step, backend="dtensor", fullgraph=True)(
            w, torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
        ).sum().backward()
        assert w.grad.dtype == torch.bfloat16 and w.grad.placements == (Shard(0),)
    forward, backward = device.graphs
    assert sends(forward) == ["all_gather_into_tensor bfloat16[8, 64]"]  # the cast is after the gather
    assert sends(backward) == ["reduce_scatter_tensor float32[64, 64]"]


def test_float8_parameters_are_gathered_narrow_and_widened_in_a_kernel():
    with offline.job(8), offline.device("h200") as device:
        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
        w = DTensor.from_local(torch.randn(8, 64, device="cuda").to(torch.float8_e4m3fn), mesh, [Shard(0)])
        scale = torch.ones((), device="cuda")

        def step(w, scale, x):
            return x @ (w.redistribute(placements=[Replicate()]).to_local().to(torch.bfloat16) * scale.bfloat16())

        torch.compile(step, backend="dtensor", fullgraph=True)(
            w, scale, torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
        )
    (graph,) = device.graphs
    assert [step.kind for step in graph.steps] == ["start", "wait", "kernel", "operator"]
    assert sends(graph) == ["all_gather_into_tensor float8_e4m3fn[8, 64]"]
    assert "fp8e4nv" in graph.kernels[0].source and graph.kernels[0].binary.spills == 0


def test_a_model_built_on_meta_is_materialised_on_the_device():
    with offline.job(8), offline.device("b200") as device:
        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model.to_empty(device="cuda")
        assert model[0].weight.to_local().device.type == "cuda" and model[0].weight.to_local().shape == (32, 64)
        torch.compile(model, backend="dtensor", fullgraph=True)(torch.randn(8, 64, device="cuda")).sum().backward()
    assert len(device.graphs) == 2
