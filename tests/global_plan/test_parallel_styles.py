"""Plans as code that users paste: the code runs, and places as the plan says."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.errors import PlacementError
from dtensor_compile.global_plan.place import place
from dtensor_compile.global_plan.placement_code import placement_code
from dtensor_compile.offline import job
from dtensor_compile.spmd import Mesh
from dtensor_compile.testing import on_ranks
from dtensor_compile.topology.links import CLUSTERS, Link

#: Links on which bytes alone count, so that small models are placed as large ones are.
SLOW = dataclasses.replace(CLUSTERS["h100"], inside=Link(1e-9, 1e7), between=Link(1e-9, 1e7))


def small_llama():
    torch.manual_seed(0)
    return Llama(LlamaConfig(layers=1, dim=256, ffn_dim=1024, heads=4, kv_heads=4, vocab=128, sequence=8))


def written(plan, form):
    scope: dict = {}
    exec(compile(placement_code(plan, form), f"<{form}>", "exec"), scope)
    return scope


def megatron(names):
    return {
        name: [Replicate()] if "norm" in name else [Shard(1 if name.split(".")[-2] in ("wo", "w2") else 0)]
        for name in names
        if "embedding" not in name and "output" not in name
    }


@pytest.mark.slow
@on_ranks(2)
def test_styles_of_columns_and_rows():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = small_llama()
    tokens = torch.randint(0, 128, (2, 8))
    names = [name for name, _ in plain.named_parameters()]
    plan = place(plain, mesh, tokens, topology=SLOW, fixed={**megatron(names), "0": [Replicate()]})
    scope = written(plan, "styles")
    kinds = {path: type(style).__name__ for path, style in scope["STYLES"].items()}
    assert kinds["blocks.*.attention.wq"] == "ColwiseParallel" and kinds["blocks.*.attention.wo"] == "RowwiseParallel"
    assert kinds["blocks.*.feed_forward.w2"] == "RowwiseParallel" and kinds["blocks.*.ffn_norm"] == "Placed"
    model = scope["parallelize"](copy.deepcopy(plain), mesh)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == plan.parameters[name], name
    (given,) = scope["distribute_inputs"]((tokens,), mesh)
    out, want = torch.compile(model, backend="dtensor_aten")(given), plain(tokens)
    torch.testing.assert_close(out.full_tensor(), want)
    (out**2).sum().backward()
    (want**2).sum().backward()
    for (name, parameter), (_, expected) in zip(model.named_parameters(), plain.named_parameters()):
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, atol=1e-4, rtol=1e-4, msg=message)


@pytest.mark.slow
@on_ranks(4)
def test_styles_and_fully_shard():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = small_llama()
    tokens = torch.randint(0, 128, (2, 8))
    fixed = {name: [Shard(0), *p] for name, p in megatron([name for name, _ in plain.named_parameters()]).items()}
    plan = place(plain, mesh, tokens, topology=SLOW, fixed={**fixed, "0": [Shard(0), Replicate()]})
    scope = written(plan, "styles")
    model = scope["parallelize"](copy.deepcopy(plain), mesh)
    mine = tokens.chunk(2)[mesh["dp"].get_local_rank()]
    (given,) = scope["distribute_inputs"]((mine,), mesh)
    torch.compile(model, backend="dtensor_aten")(given).full_tensor().pow(2).mean().backward()
    plain(tokens).pow(2).mean().backward()
    for (name, parameter), (_, expected) in zip(model.named_parameters(), plain.named_parameters()):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_code_of_other_meshes():
    with job(2):
        mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
        whole = [Replicate()] * 3
        fixed = {name: whole for name in ("weight", "bias", "0")}
        plan = place(nn.Linear(8, 8), mesh, torch.ones(8, 8), topology="h100", fixed=fixed)
        with pytest.raises(PlacementError, match="one or two dims, not 3"):
            placement_code(plan, "styles")
        assert set(written(plan, "tensors")["STATE"]) == {"weight", "bias"}


@pytest.mark.slow
@on_ranks(2)
def test_marks():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = small_llama()
    names = [name for name, _ in plain.named_parameters()]
    tokens = torch.randint(0, 128, (2, 8))
    plan = place(plain, mesh, tokens, topology=SLOW, fixed={**megatron(names), "0": [Replicate()]})
    scope = written(plan, "marks")
    assert scope["STATE"]["blocks.*.attention.wo.weight"] == (None, "tp")
    model = copy.deepcopy(plain)
    scope["mark"](model, Mesh(range(2), (2,), ("tp",)), tokens)
    out = torch.compile(model, backend="dtensor_aten")(tokens)
    out = out.full_tensor() if isinstance(out, DTensor) else out
    torch.testing.assert_close(out, plain(tokens))
    wo = model.blocks[0].attention.wo.weight
    assert isinstance(wo, DTensor) and wo.placements == (Shard(1),)
