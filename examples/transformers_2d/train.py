"""A Llama of transformers, `fully_shard` x tensor parallel by the plans that come with it.

torchrun --nproc-per-node 4 examples/transformers_2d/train.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

CONFIG = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1024, "use_cache": False}


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model and a training step; a program that loads weights calls ``from_pretrained(name,
    distributed_config=...)`` instead.
    """
    config = LlamaConfig(**CONFIG, num_attention_heads=8, num_key_value_heads=4)
    sizes = DistributedConfig(fsdp_size=dist.get_world_size() // 2, tp_size=2)
    placed, _, meshes = LlamaForCausalLM.prepare_distribute_model(sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM.maybe_distribute_model(LlamaForCausalLM(config), placed, meshes)
    if backend is not None:
        model.compile(backend=backend)
    mine = torch.Generator().manual_seed(
        dist.get_rank() // 2
    )  # ranks that share a shard of the data have the same batches
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        tokens = torch.randint(config.vocab_size, (2, 128), generator=mine)
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
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
