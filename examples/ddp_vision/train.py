"""A ViT of transformers under DistributedDataParallel, compiled with its step.

torchrun --nproc-per-node 2 examples/ddp_vision/train.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import ViTConfig, ViTForImageClassification

CONFIG = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "image_size": 64, "patch_size": 8}


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model and a training step."""
    config = ViTConfig(**CONFIG, num_attention_heads=4, num_labels=10)
    torch.manual_seed(0)
    model = DistributedDataParallel(ViTForImageClassification(config))
    compiled = model if backend is None else torch.compile(model, backend=backend)
    mine = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        images, labels = torch.randn(4, 3, 64, 64, generator=mine), torch.randint(10, (4,), generator=mine)
        optimizer.zero_grad()
        loss = compiled(pixel_values=images, labels=labels).loss
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
