"""A distributed checkpoint, written by a model under `fully_shard` and resumed tensor parallel, on another mesh.

torchrun --nproc-per-node 2 examples/checkpoint_resume/train.py
"""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

CONFIG = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1024, "use_cache": False}


def distributed(config: LlamaConfig, sizes: DistributedConfig) -> LlamaForCausalLM:
    """The model on a mesh of these sizes."""
    placed, _, meshes = LlamaForCausalLM.prepare_distribute_model(sizes)
    return LlamaForCausalLM.maybe_distribute_model(LlamaForCausalLM(config), placed, meshes)


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The resumed model and a training step."""
    config = LlamaConfig(**CONFIG, num_attention_heads=8, num_key_value_heads=4)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    torch.manual_seed(0)
    before = distributed(config, DistributedConfig(fsdp_size=dist.get_world_size()))
    dcp.save(get_model_state_dict(before), checkpoint_id=folder[0])

    torch.manual_seed(1)  # other weights, until the checkpoint is read
    model = distributed(config, DistributedConfig(tp_size=dist.get_world_size()))
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(model, state)
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
