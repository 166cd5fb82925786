"""torchtitan's Llama under its own `fully_shard` x tensor parallel, compiled as a whole.

``--compile.backend dtensor`` of torchtitan's own trainer compiles each block; `docs/integrations.md` shows both.

    torchrun --nproc-per-node 4 examples/torchtitan_llama/train.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchtitan.distributed.parallel_dims
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import parallelize_llama

CONFIG = {"dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 1024, "max_seq_len": 128}


def build(backend: str | None) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model and a training step."""
    torchtitan.distributed.parallel_dims.device_type = "cpu"  # it takes a GPU for granted
    sizes = {"dp_replicate": 1, "dp_shard": dist.get_world_size() // 2, "cp": 1, "tp": 2, "pp": 1, "ep": 1, "etp": 1}
    dims, job = ParallelDims(**sizes, world_size=dist.get_world_size()), JobConfig()
    job.training.seq_len, job.parallelism.disable_loss_parallel, job.training.mixed_precision_param = (
        128,
        True,
        "float32",
    )
    torch.manual_seed(0)
    model = Transformer(TransformerModelArgs(**CONFIG))
    with torch.no_grad():
        model.init_weights()
    model = parallelize_llama(model, dims, job)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that divides first
    if backend is not None:
        model.compile(backend=backend)
    mine = torch.Generator().manual_seed(
        dist.get_rank() // 2
    )  # ranks that share a shard of the data have the same batches
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        tokens = torch.randint(CONFIG["vocab_size"], (2, 129), generator=mine)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
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
