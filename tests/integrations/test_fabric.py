"""Lightning Fabric applies ``torch.compile`` again around what its strategy made; nothing of ours is needed."""

import pytest
import torch

from dtensor_compile.testing import run_on_ranks
from tests.integrations.models import Model, graphs

pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed")

from lightning_fabric import Fabric  # noqa: E402
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def parallelize(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.layers:
        parallelize_module(layer, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def strategy_of(name):
    if name == "ddp":
        return DDPStrategy()
    if name == "fsdp2":
        return ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    return ModelParallelStrategy(parallelize, data_parallel_size=1, tensor_parallel_size=2)


def train(strategy, backend, accumulates):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy_of(strategy))
    fabric.launch()
    torch.manual_seed(0)
    model = Model()
    if backend:
        model = torch.compile(model, backend=backend, options={"strict": True})
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(0 if strategy == "tp" else fabric.global_rank)
    losses = []
    for call in range(8 if accumulates else 4):
        held = accumulates and call % 2 == 0
        with fabric.no_backward_sync(model, enabled=held):
            loss = model(torch.randn(4, 16, generator=generator)).square().mean()
            fabric.backward(loss)
        losses.append(loss.item())
        if not held:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train_both(strategy, backend, accumulates=False):
    graphs()
    eager = train(strategy, None, accumulates)
    assert graphs() == (0, [])
    return eager, train(strategy, backend, accumulates), *graphs()


@pytest.mark.parametrize(
    "strategy, backend", [("ddp", "dtensor_aten"), ("fsdp2", "dtensor_aten"), ("tp", "dtensor_aten"), ("tp", "dtensor")]
)
def test_fabric_trains_like_eager(strategy, backend):
    for eager, compiled, compiles, breaks in run_on_ranks(2, train_both, strategy, backend):
        torch.testing.assert_close(compiled, eager)
        assert compiles > 0 and not breaks


def test_fabric_accumulates_under_fully_shard():
    for eager, compiled, _, breaks in run_on_ranks(2, train_both, "fsdp2", "dtensor_aten", True):
        torch.testing.assert_close(compiled, eager)
        assert not breaks
