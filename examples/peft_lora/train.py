"""LoRA of PEFT on a Llama of transformers under `fully_shard`: frozen weights are gathered, gradients of adapters alone
are reduced.

torchrun --nproc-per-node 2 examples/peft_lora/train.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1024, "use_cache": False}


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model and a training step."""
    config = LlamaConfig(**CONFIG, num_attention_heads=8, num_key_value_heads=4)
    torch.manual_seed(0)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if backend is not None:
        model.compile(backend=backend)
    mine = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

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
