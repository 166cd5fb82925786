"""Ten models that are placed, distributed and compiled on real ranks train as the plain ones."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

import dtensor_compile
from dtensor_compile.testing import on_ranks
from tests.global_plan.models import MODELS

STEPS = 3
#: Models of the fast suite.


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def trains_as_the_plain_model(name, mesh, **options):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    plain = make().double()
    model = copy.deepcopy(plain)
    plan = dtensor_compile.place(model, mesh, inputs(0), topology="h100", **options)
    plan.apply(model)
    with dtensor_compile.record() as recording:
        run = torch.compile(model, backend="dtensor_aten", options={"plan": "global", "topology": "h100"})
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        for seed in range(STEPS):
            args = inputs(seed)
            want = plain(*args)
            with implicit_replication():
                loss = run(*plan.distribute_inputs(args))
            torch.testing.assert_close(whole(loss), want)
            want.backward()
            loss.backward()
            for (of, mine), (_, theirs) in zip(model.named_parameters(), plain.named_parameters()):
                torch.testing.assert_close(whole(mine.grad), theirs.grad, msg=lambda text, of=of: f"{of}: {text}")
                assert mine.grad.placements == mine.placements
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert not recording.breaks
    lost = [d.reason for d in recording.decisions if d.kind == "global_plan" and d.left_alone]
    assert not lost, lost
    return plan


def in_half_the_memory(name, mesh):
    """With half of the bytes that replicas of parameters, gradients and states take, so that they are sharded."""
    held = 4 * 8 * sum(p.numel() for p in MODELS[name][0]().parameters())
    plan = trains_as_the_plain_model(name, mesh, memory=held / 2)
    assert any(p.is_shard() for placements in plan.parameters.values() for p in placements)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_the_plain_one(name):
    on_two_ranks(name)


@on_ranks(2)
def on_two_ranks(name):
    in_half_the_memory(name, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_over_two_mesh_dims(name):
    on_four_ranks(name)


@on_ranks(4, timeout=300.0)
def on_four_ranks(name):
    in_half_the_memory(name, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
