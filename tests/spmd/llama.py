"""A small Llama on a 2x2 mesh, sharded by three marks a block, and by a plan written by hand."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from dtensor_compile.demo.llama import Llama, LlamaConfig
from dtensor_compile.spmd import Mesh, mark_sharding, shard_module

SMALL = LlamaConfig(layers=2, dim=32, ffn_dim=64, heads=4, kv_heads=2, vocab=64, sequence=16)
BATCH = 4


class WithLoss(nn.Module):
    """Tokens and targets to the mean loss: the program that is compiled. It works on shards of the batch as on the
    whole.

    `count`: the mean is that of the targets that count (all but those to be ignored), as ``cross_entropy`` has it; else
    that of all."""

    def __init__(self, model, count=True):
        super().__init__()
        self.model, self.count = model, count

    def forward(self, tokens, targets):
        logits = self.model(tokens).flatten(0, 1)
        if self.count:
            return F.cross_entropy(logits, targets.flatten())
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / targets.numel()


def build(config=SMALL, count=True):
    torch.manual_seed(0)
    return WithLoss(Llama(config), count)


def data(config=SMALL):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, config.vocab, (BATCH, config.sequence), generator=generator) for _ in range(2)]


def mark(module, mesh):
    """Three annotations a block: the weights of q and o, and one of the MLP."""
    for block in module.model.blocks:
        mark_sharding(block.attention.wq.weight, mesh, ("tp", None))
        mark_sharding(block.attention.wo.weight, mesh, (None, "tp"))
        mark_sharding(block.feed_forward.w2.weight, mesh, (None, "tp"))


def annotated(config=SMALL, store=True, count=True):
    mesh = Mesh(range(4), (2, 2), ("dp", "tp"))
    module, inputs = build(config, count), data(config)
    mark(module, mesh)
    for x in inputs:
        mark_sharding(x, mesh, ("dp", None))
    placed = shard_module(module, *inputs) if store else None
    return module, inputs, placed


def by_hand(mesh, config=SMALL, count=True):
    """The same as a plan: tensor parallel over tp; each rank is given its part of the batch. Gradients are still to be
    averaged.
    """
    module = build(config, count)
    tp = mesh["tp"]
    for block in module.model.blocks:
        whole = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
        parallelize_module(
            block,
            tp,
            {
                "attention": PrepareModuleInput(
                    input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
                ),
                **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
                "attention.wo": RowwiseParallel(),
                "feed_forward": PrepareModuleInput(**whole),
                **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
                "feed_forward.w2": RowwiseParallel(),
            },
        )
    inputs = [x.chunk(2)[mesh.get_local_rank("dp")] for x in data(config)]
    return module, inputs
