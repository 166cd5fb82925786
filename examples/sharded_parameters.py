"""Data parallel training with parameters, gradients and optimizer states in shards (FSDP-like), compiled.

    torchrun --nproc-per-node 2 examples/sharded_parameters.py

Each rank trains on its own part of the batch. On several machines give torchrun its --nnodes and --rdzv-endpoint. With
GPUs it takes NCCL, without gloo.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import shard_parameters


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("dp",))

    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(layers=2)
    model = shard_parameters(Llama(config).to(device), mesh)
    compiled = torch.compile(model, backend="dtensor", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(10):
        tokens = torch.randint(config.vocab, (2 * world, config.sequence + 1)).chunk(world)[rank].to(device)
        optimizer.zero_grad()
        # Gradients are summed over the ranks; dividing the loss makes that the mean over the whole batch.
        loss = F.cross_entropy(compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / world
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
