"""Ways to parallelize `Llama`, written with torch's own API as users do. Nothing here depends on a compiler."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils.parametrize import register_parametrization

from dtensor_compile.demo.llama import Llama


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """Tensor and sequence parallel over a 1-D mesh: weights are sharded by heads and by hidden units, activations
    between the blocks by sequence, the embedding by rows of its table. Logits are replicated on every rank."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )
    return model


def columns_and_rows(model: Llama, mesh: DeviceMesh) -> Llama:
    """Weights sharded by heads and by hidden units over the last mesh dim, and nothing else: what operators read is
    left to DTensor, or to ``"plan": "global"``. Norms, embedding and buffers are replicated."""
    outer = [Replicate()] * (mesh.ndim - 1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        is_parameter = isinstance(tensor, nn.Parameter)
        whole = not is_parameter or "norm" in owner or "embedding" in owner
        last = Replicate() if whole else Shard(1 if owner.endswith(("wo", "w2")) else 0)
        placed = distribute_tensor(tensor.detach(), mesh, [*outer, last], src_data_rank=None)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(placed) if is_parameter else placed)
    return model


class Gathered(nn.Module):
    """A parameter that is stored in shards over `mesh` and gathered for use; its gradient is reduced to the shards.

    If the full parameter is itself a DTensor over another mesh (tensor parallel inside, sharded storage outside),
    `inner` is that mesh and `placement` the placement on it.
    """

    def __init__(self, mesh: DeviceMesh, inner: DeviceMesh | None = None, placement: Placement | None = None) -> None:
        super().__init__()
        self.mesh, self.inner = mesh, inner
        rest = () if inner is None else (placement,)
        self.whole = (Replicate(), *rest)
        self.gradient = (Partial(), *rest)

    def forward(self, shard: DTensor) -> torch.Tensor:
        local = shard.redistribute(self.mesh, self.whole).to_local(grad_placements=self.gradient)
        return local if self.inner is None else DTensor.from_local(local, self.inner, self.whole[1:], run_check=False)


def shard_parameters(model: Llama, mesh: DeviceMesh) -> Llama:
    """Data parallel over a 1-D mesh with sharded parameters, gradients and optimizer states (as in FSDP). Each rank
    uses its own part of the batch, and divides its loss by the number of ranks."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(module, name, nn.Parameter(sharded))
            register_parametrization(module, name, Gathered(mesh), unsafe=True)
    return model


def fully_sharded(model: Llama, mesh: DeviceMesh) -> Llama:
    """Data parallel with parameters sharded by ``fully_shard``, block by block, over the mesh dim ``dp``; tensor
    parallel over ``tp`` if the mesh has it. The wrapper averages gradients."""
    if "tp" in (mesh.mesh_dim_names or ()):
        tensor_parallel(model, mesh["tp"])
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["dp"])
    return model


def two_dim(model: Llama, mesh: DeviceMesh) -> Llama:
    """Both over a 2-D mesh (dp, tp): tensor and sequence parallel inside, parameters stored in shards over the
    data-parallel ranks. A parameter is sharded over dp along another tensor dim than over tp, so that each gather is
    over one mesh dim."""
    assert mesh.mesh_dim_names is not None
    tp = mesh[mesh.mesh_dim_names[1]]
    tensor_parallel(model, tp)
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
            dim = 1 - placement.dim if isinstance(placement, Shard) and parameter.dim() > 1 else 0
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            part = local.detach().chunk(mesh.size(0), dim)[mesh.get_local_rank(0)].contiguous()
            sharded = DTensor.from_local(part, mesh, [Shard(dim), placement], run_check=False)
            setattr(module, name, nn.Parameter(sharded))
            inner = tp if isinstance(parameter, DTensor) else None
            register_parametrization(
                module, name, Gathered(mesh, inner, placement) if inner else Gathered(mesh), unsafe=True
            )
    return model
