"""A Llama of transformers, trained by accelerate, with gradients accumulated over two microbatches.

torchrun --nproc-per-node 2 examples/accelerate_ddp/train.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from dtensor_compile.integrations.accelerate import enable

CONFIG = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1024, "use_cache": False}


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model and a training step, of two microbatches."""
    config = LlamaConfig(**CONFIG, num_attention_heads=8, num_key_value_heads=4)
    enable()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_backend=backend)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    batches = torch.Generator().manual_seed(dist.get_rank())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> torch.Tensor:
        for _ in range(2):
            tokens = torch.randint(config.vocab_size, (2, 128), generator=batches)
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
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
