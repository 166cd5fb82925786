"""Tensor and sequence parallel training of a small Llama, compiled.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

On several machines give torchrun its --nnodes and --rdzv-endpoint. With GPUs it takes NCCL, without gloo.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import tensor_parallel


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))

    torch.manual_seed(0)  # the same weights and the same batches on every rank
    config = LlamaConfig(layers=2)
    model = tensor_parallel(Llama(config).to(device), mesh)
    compiled = torch.compile(model, backend="dtensor", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(10):
        tokens = torch.randint(config.vocab, (4, config.sequence + 1)).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
