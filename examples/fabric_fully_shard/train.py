"""A Llama of transformers under Lightning Fabric and `fully_shard`, with gradients accumulated over two microbatches.

torchrun --nproc-per-node 2 examples/fabric_fully_shard/train.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1024, "use_cache": False}


def shard(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """Each layer, and the whole, over the data-parallel ranks."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model and a training step, of two microbatches."""
    config = LlamaConfig(**CONFIG, num_attention_heads=8, num_key_value_heads=4)
    strategy = ModelParallelStrategy(shard, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if backend is not None:
        model = torch.compile(model, backend=backend)
    model = fabric.setup(model)
    batches = torch.Generator().manual_seed(dist.get_rank())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> torch.Tensor:
        for held in (True, False):
            tokens = torch.randint(config.vocab_size, (2, 128), generator=batches)
            with fabric.no_backward_sync(model, enabled=held):
                loss = model(tokens, labels=tokens).loss
                fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, step = build("dtensor")
    for number in range(10):
        loss = step().item()
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss:.4f}")
    dist.destroy_process_group()
