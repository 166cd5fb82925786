"""A Llama of transformers, tensor parallel by the plan that comes with it.

torchrun --nproc-per-node 2 examples/transformers_tp/train.py
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
    placed, _, meshes = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=dist.get_world_size()))
    torch.manual_seed(0)
    model = LlamaForCausalLM.maybe_distribute_model(LlamaForCausalLM(config), placed, meshes)
    if backend is not None:
        model.compile(backend=backend)
    batches = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        tokens = torch.randint(config.vocab_size, (2, 128), generator=batches)
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
