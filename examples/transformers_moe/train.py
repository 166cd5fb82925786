"""A Qwen3 mixture of experts of transformers: `fully_shard`, each rank with some of the experts, tokens sent by
all-to-all.

torchrun --nproc-per-node 2 examples/transformers_moe/train.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from dtensor_compile.integrations.transformers import all_to_all_without_branches

CONFIG = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1024, "use_cache": False}
EXPERTS = {"moe_intermediate_size": 192, "num_experts": 8, "num_experts_per_tok": 2}


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model and a training step; a program that loads weights calls ``from_pretrained(name,
    distributed_config=...)`` instead.
    """
    config = Qwen3MoeConfig(**CONFIG, **EXPERTS, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    all_to_all_without_branches()
    ranks = dist.get_world_size()
    sizes = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
    placed, _, meshes = Qwen3MoeForCausalLM.prepare_distribute_model(sizes)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM.maybe_distribute_model(Qwen3MoeForCausalLM(config), placed, meshes)
    if backend is not None:
        model.compile(backend=backend)
    mine = torch.Generator().manual_seed(dist.get_rank())
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
