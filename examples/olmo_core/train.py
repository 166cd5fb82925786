"""OLMo-core's OLMo 2 (30M, four blocks), under its own `fully_shard`, compiled as a whole.

torchrun --nproc-per-node 2 examples/olmo_core/train.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import TransformerConfig
from torch.distributed.device_mesh import init_device_mesh

VOCABULARY = 1024


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model and a training step; OLMo-core's own ``model.apply_compile()`` would compile each block with
    Inductor.
    """
    model = TransformerConfig.olmo2_30M(VOCABULARY).build(init_device="meta")
    model.apply_fsdp(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    model.init_weights(max_seq_len=128, device=torch.device("cpu"))
    if backend is not None:
        model.compile(backend=backend)
    batches = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        tokens = torch.randint(VOCABULARY, (2, 128), generator=batches)
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
