"""Generation by a tensor-parallel Llama of transformers, with a static cache: the step that makes a token is compiled.

torchrun --nproc-per-node 2 examples/transformers_generate/train.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

CONFIG = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1024}


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model, and what generates 16 tokens; a program that loads weights calls ``from_pretrained(name,
    distributed_config=...)`` instead.
    """
    config = LlamaConfig(**CONFIG, num_attention_heads=8, num_key_value_heads=4)
    placed, _, meshes = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=dist.get_world_size()))
    torch.manual_seed(0)
    model = LlamaForCausalLM.maybe_distribute_model(LlamaForCausalLM(config), placed, meshes)
    model.eval()
    batches = torch.Generator().manual_seed(1)
    how = {
        "max_new_tokens": 16,
        "do_sample": False,
        "cache_implementation": "static",
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    if backend is not None:
        how["compile_config"] = CompileConfig(backend=backend, fullgraph=True)
        how[
            "compile_config"
        ]._compile_all_devices = True  # on CPUs transformers leaves it out otherwise, as in its own tests

    def step() -> torch.Tensor:
        tokens = torch.randint(config.vocab_size, (2, 32), generator=batches)
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), **how).float()

    return model, step


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, step = build("dtensor")
    for number in range(10):
        tokens = step()
        if dist.get_rank() == 0:
            print(f"call {number}: {tokens[0, -16:].long().tolist()}")
    dist.destroy_process_group()
