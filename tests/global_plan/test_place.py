"""Placements that are found for a step, as people write them by hand."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtensor_compile.compat.dtensor.step_record import BACKWARD, FORWARD, record_step
from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.errors import MeshError, PlacementError
from dtensor_compile.global_plan.equal_calls import classes_of_calls
from dtensor_compile.global_plan.place import place, sum_of_results
from dtensor_compile.global_plan.placement_code import placement_code
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.offline import job


@pytest.fixture(scope="module")
def meshes():
    with job(8):
        yield {
            "tp": init_device_mesh("cpu", (8,), mesh_dim_names=("tp",)),
            "2d": init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")),
            "nameless": init_device_mesh("cpu", (8,)),
        }


class Mlp(nn.Module):
    def __init__(self, dim=4096, hidden=16384):
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(hidden, dim, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, dim=4096, heads=32):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False, dtype=torch.bfloat16) for _ in range(4))

    def forward(self, x):
        batch, rows, dim = x.shape
        q, k, v = (f(x).view(batch, rows, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, rows, dim))


def on_meta(make):
    with torch.device("meta"):
        return make()


def rows(batch, length, dim=4096):
    return torch.empty(batch, length, dim, dtype=torch.bfloat16, device="meta")


def texts(placements):
    return {name: spec_text(p) for name, p in placements.items()}


@pytest.mark.parametrize("length", [16, 256])
def test_an_mlp_of_few_rows_is_a_column_and_a_row(meshes, length):
    plan = place(on_meta(Mlp), meshes["tp"], rows(1, length), topology="h100", fixed={"0": [Replicate()]})
    assert texts(plan.parameters) == {"up.weight": "S(0)", "down.weight": "S(1)"}
    assert plan.choice.gap < 0.01


def test_attention_of_few_rows_is_sharded_by_heads(meshes):
    plan = place(on_meta(Attention), meshes["tp"], rows(4, 64), topology="h100", fixed={"0": [Replicate()]})
    assert texts(plan.parameters) == {"q.weight": "S(0)", "k.weight": "S(0)", "v.weight": "S(0)", "out.weight": "S(1)"}


def test_many_rows_are_data_parallel_with_parameters_in_shards(meshes):
    """As fast as with replicas, and sends as little: what holds less is chosen. (An H100's all-reduces are faster than
    reduce-scatters and all-gathers: its switch adds up.)"""
    plan = place(on_meta(Mlp), meshes["tp"], rows(8, 4096), topology="v100")
    assert plan.results["up"] == (Shard(0),) and plan.inputs == [(Shard(0),)]
    assert "R" not in texts(plan.parameters).values()
    replicas = next(known.choice for known in plan.known if known.name == "data parallel")
    assert plan.choice.seconds <= replicas.seconds * 1.006 and plan.choice.sent <= replicas.sent * 1.03
    assert plan.choice.memory < 0.7 * replicas.memory


def test_a_long_sequence_of_a_small_batch_is_sharded_by_rows(meshes):
    plan = place(on_meta(Attention), meshes["tp"], rows(1, 65536), topology="h100")
    assert plan.results["out"] == (Shard(1),)


def test_a_budget_that_replicas_do_not_fit(meshes):
    fixed = {name: [Replicate()] for name in ("up.weight", "down.weight")}
    replicas = place(on_meta(Mlp), meshes["tp"], rows(8, 2048), topology="h100", fixed=fixed)
    budget = replicas.choice.memory * 0.6
    assert not place(on_meta(Mlp), meshes["tp"], rows(8, 2048), topology="h100", memory=budget, fixed=fixed).choice.fits
    plan = place(on_meta(Mlp), meshes["tp"], rows(8, 2048), topology="h100", memory=budget)
    assert plan.choice.fits and plan.choice.memory <= budget


def test_a_budget_that_nothing_fits_is_said(meshes):
    plan = place(on_meta(Mlp), meshes["tp"], rows(8, 2048), topology="h100", memory=1e6)
    assert not plan.choice.fits
    least = place(on_meta(Mlp), meshes["tp"], rows(8, 2048), topology="h100", memory=plan.choice.memory)
    assert least.choice.fits


@pytest.mark.slow
def test_equal_blocks_have_equal_placements_and_cost_one_search(meshes):
    config = dataclasses.replace(LlamaConfig(), layers=4, dim=256, sequence=128, vocab=512)
    model = on_meta(lambda: Llama(config))
    tokens = torch.zeros(64, 128, dtype=torch.long, device="meta")
    plan = place(model, meshes["2d"], (tokens,), topology="h100")
    assert len({plan.parameters[f"blocks.{i}.attention.wq.weight"] for i in range(4)}) == 1
    shallow = place(
        on_meta(lambda: Llama(dataclasses.replace(config, layers=3))), meshes["2d"], (tokens,), topology="h100"
    )
    assert len(shallow.variables.model.variables) == len(plan.variables.model.variables)
    assert plan.choice.gap < 0.01
    assert not plan.without_rule


def test_calls_of_the_backward_pass_have_the_module_of_their_forward():
    model = on_meta(lambda: nn.Sequential(Mlp(64, 128), Mlp(64, 128)))
    step = record_step(model, (rows(2, 8, 64),), {}, sum_of_results, torch.device("cpu"))
    matmuls = [(call.module, call.phase) for call in step.calls if call.name == "aten.mm"]
    assert matmuls[:4] == [(f"{i}.{name}", FORWARD) for i in "01" for name in ("up", "down")]
    back = [f"{i}.{name}" for i in "10" for name in ("down", "up")]
    assert sorted({module for module, phase in matmuls[4:] if phase == BACKWARD}) == sorted(back)
    assert step.gradients.keys() == step.parameters.keys()
    by_class = {}
    for call, number in zip(step.calls, classes_of_calls(step)):
        by_class.setdefault(number, set()).add((call.name, call.module.partition(".")[2], call.phase))
    assert all(len(calls) == 1 for calls in by_class.values())


def test_dtensors_stay_as_they_are(meshes):
    mesh = meshes["tp"]
    model = Mlp(64, 128)
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.data, mesh, [Shard(1)], src_data_rank=None))
    plan = place(model, mesh, rows(1, 8, 64), topology="h100")
    assert plan.parameters["up.weight"] == (Shard(1),)
    with pytest.raises(PlacementError, match=r"up\.weight is fixed to S\(0\), and is a DTensor with S\(1\)"):
        place(model, mesh, rows(1, 8, 64), fixed={"up.weight": [Shard(0)]})


def test_the_plan_is_applied(meshes):
    model = Mlp(64, 128)
    plan = place(model, meshes["tp"], rows(1, 8, 64), topology="h100", fixed={"up.weight": [Shard(0)]})
    plan.apply(model)
    assert isinstance(model.up.weight, DTensor) and model.up.weight.placements == (Shard(0),)
    (x,) = plan.distribute_inputs((torch.ones(1, 8, 64, dtype=torch.bfloat16),))
    assert x.placements == plan.inputs[0]
    assert model(x).shape == (1, 8, 64)
    with pytest.raises(PlacementError, match="sizes"):
        plan.apply(Mlp(64, 64))


class Tied(nn.Module):
    """An embedding that is the head too, a buffer, and a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens) * self.scale)[0])


@pytest.mark.parametrize("by_code", [False, True])
def test_tied_parameters_stay_tied_and_buffers_are_distributed(meshes, by_code):
    model = Tied()
    plan = place(model, meshes["tp"], torch.zeros(8, 4, dtype=torch.long), topology="h100")
    if by_code:
        scope: dict = {}
        exec(placement_code(plan), scope)
        scope["distribute"](model, meshes["tp"])
    else:
        plan.apply(model)
        assert model.layer._flat_weights[0] is model.layer.weight_ih_l0
    assert model.head.weight is model.embedding.weight
    assert all(isinstance(tensor, DTensor) for tensor in (*model.parameters(), *model.buffers()))


class Odd(nn.Module):
    """Calls an operator for which DTensor has no rule."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x):
        return torch.cdist(x @ self.weight, x)


def test_an_operator_without_a_rule_is_named(meshes):
    plan = place(Odd(), meshes["tp"], torch.ones(16, 16), topology="h100")
    assert any("_cdist_forward" in name for name in plan.without_rule)


def test_bad_input(meshes):
    with pytest.raises(MeshError, match="mesh_dim_names"):
        place(Mlp(64, 128), meshes["nameless"], rows(1, 8, 64))
    with pytest.raises(PlacementError, match="'up.bias', which is no parameter"):
        place(Mlp(64, 128), meshes["tp"], rows(1, 8, 64), fixed={"up.bias": [Replicate()]})
    with pytest.raises(PlacementError, match="cuts dim 0 of 1 into 8"):
        place(Mlp(64, 128), meshes["tp"], rows(1, 8, 64), fixed={"0": [Shard(0)]})
