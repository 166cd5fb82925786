"""Both at once on a 2-D mesh (dp, tp): tensor and sequence parallel inside, parameters stored in shards over the
data-parallel ranks.

    torchrun --nproc-per-node 4 examples/two_dim.py

On several machines give torchrun its --nnodes and --rdzv-endpoint. With GPUs it takes NCCL, without gloo.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.demo.parallel import two_dim


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    tp = 2
    mesh = init_device_mesh(device, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    parts, mine = mesh.size(0), mesh.get_local_rank("dp")

    torch.manual_seed(0)  # the same weights and the same global batches on every rank
    config = LlamaConfig(layers=2)
    model = two_dim(Llama(config).to(device), mesh)
    compiled = torch.compile(model, backend="dtensor", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # parameters lie on meshes of two kinds

    for step in range(10):
        tokens = torch.randint(config.vocab, (2 * parts, config.sequence + 1)).chunk(parts)[mine].to(device)
        optimizer.zero_grad()
        # Gradients are summed over the data-parallel ranks; dividing the loss makes that the mean over the whole batch.
        loss = F.cross_entropy(compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / parts
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
