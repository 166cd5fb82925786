"""Training steps as programs have them: a Llama under a data-parallel wrapper, in variants. For the benchmarks and for
tests.

    with offline.job(RANKS), offline.device("h100") as gpu:
        built = build("fully_shard x tensor parallel: mixed precision", "cuda")
        built.step(lambda f: torch.compile(f, backend="dtensor", **built.options))
    gpu.graphs        # the code that Inductor wrote, with its kernels, and the order in which they ran

Nothing here knows of a compiler. `CONFIGURATIONS` names twelve of them, `NAMES` all that there are; each is for `RANKS`
ranks unless `mesh_shape` says otherwise. Parallelisms: ``fully_shard``, the same x tensor parallel, HSDP
(``fully_shard`` on a mesh of two dims), and the three forms of replication (``replicate`` as FSDP2 has it,
``replicate`` as DDP has it, ``DistributedDataParallel``). Variants:

| variant         | what it is                                                                               |
|-----------------|------------------------------------------------------------------------------------------|
| plain           | float32                                                                                  |
| mixed precision | the wrapper computes in bfloat16 and reduces gradients in float32; DDP: ``autocast``     |
| checkpointed    | the blocks run again in the backward pass                                                |
| uneven          | a vocabulary, and a hidden size of the feed-forward layers, that the ranks do not divide |
| dynamic         | sizes of the inputs are symbols                                                          |
| masked          | attention under a mask of each batch, in place of causal attention                       |
| masked, dynamic | both                                                                                     |
| sharded loss    | logits split by vocabulary inside of ``loss_parallel``                                   |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dtensor_compile.demo.llama import Block, Llama, LlamaConfig
from dtensor_compile.demo.parallel import tensor_parallel

RANKS = 8
#: Sequences of a rank.
BATCH = 2
SMALL = LlamaConfig(layers=2, dim=128, ffn_dim=384, heads=8, kv_heads=8, vocab=512, sequence=64)
#: Llama 3 8B, two of its 32 layers; for a mesh of 32 x 8.
LLAMA_8B = LlamaConfig(layers=2, dim=4096, ffn_dim=14336, heads=32, kv_heads=8, vocab=128256, sequence=2048)

#: Mesh dims of the parallelisms, and the shape of the mesh for `RANKS` ranks.
MESHES: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "fully_shard": (("dp",), (8,)),
    "fully_shard x tensor parallel": (("dp", "tp"), (4, 2)),
    "HSDP": (("replicate", "shard"), (2, 4)),
    "replicate": (("dp",), (8,)),
    "replicate (DDP)": (("dp",), (8,)),
    "DDP": (("dp",), (8,)),
}
VARIANTS = (
    "plain",
    "mixed precision",
    "checkpointed",
    "uneven",
    "dynamic",
    "masked",
    "masked, dynamic",
    "sharded loss",
)
#: All configurations, by name.
NAMES: tuple[str, ...] = tuple(
    f"{parallelism}: {variant}"
    for parallelism in MESHES
    for variant in VARIANTS
    if variant != "sharded loss" or "tp" in MESHES[parallelism][0]
)
#: The twelve that benchmarks and tests go through.
CONFIGURATIONS: tuple[str, ...] = (
    "fully_shard: plain",
    "fully_shard: mixed precision",
    "fully_shard: dynamic",
    "fully_shard x tensor parallel: plain",
    "fully_shard x tensor parallel: mixed precision",
    "fully_shard x tensor parallel: checkpointed",
    "fully_shard x tensor parallel: uneven",
    "fully_shard x tensor parallel: dynamic",
    "fully_shard x tensor parallel: sharded loss",
    "HSDP: mixed precision",
    "replicate: plain",
    "DDP: plain",
)


@dataclass
class Built:
    """A configuration on its mesh.

    Attributes:
        model: the wrapped model.
        loss: inputs to this rank's loss; what is compiled.
        inputs: token indices and targets of this rank, (batch, sequence) both; of several steps where sizes vary.
        options: for ``torch.compile``.
        around: entered for forward and backward.
    """

    model: nn.Module
    loss: Callable[..., torch.Tensor]
    inputs: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(
        self, compile: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]] = lambda f: f
    ) -> torch.Tensor:
        """Forward, loss and backward, once for each of `inputs`; the last loss.

        Args:
            compile: what is called in place of `loss`; left out, that runs in eager.
        """
        run = compile(self.loss)
        for tokens, targets in self.inputs:
            with self.around():
                loss = run(tokens, targets)
                loss.backward()
        return loss


class Checkpointed(nn.Module):
    """A block that keeps its inputs for the backward pass, and runs again in it."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return checkpoint(self.block, x, rotary, mask=mask, use_reentrant=False)


def build(
    name: str,
    device_type: str,
    config: LlamaConfig = SMALL,
    mesh_shape: tuple[int, ...] | None = None,
    batch: int = BATCH,
) -> Built:
    """A configuration on the ranks of the job.

    Args:
        name: one of `NAMES`.
        config: of the model. An uneven one has other sizes of vocabulary and feed-forward layers.
        mesh_shape: of the mesh; by default that for `RANKS` ranks.
        batch: sequences of a rank.
    """
    parallelism, _, variant = name.partition(": ")
    dims, shape = MESHES[parallelism]
    dynamic, masked = variant.endswith("dynamic"), variant.startswith("masked")
    mesh = init_device_mesh(device_type, mesh_shape or shape, mesh_dim_names=dims)
    if variant == "uneven":
        config = replace(config, vocab=config.vocab - 3, ffn_dim=config.ffn_dim - 2)
    with torch.device(device_type):
        model: nn.Module = Llama(config)
        lengths = (config.sequence, config.sequence // 2) if dynamic else (config.sequence,)
        inputs = tuple(_tokens(config, batch, length) for length in lengths)
    if "tp" in dims:
        _spread(model, mesh["tp"], config, sharded_loss=variant == "sharded loss")
    if variant == "checkpointed":
        model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    model = _wrapped(parallelism, model, mesh, mixed=variant == "mixed precision")
    built = Built(model, _loss(model, None, masked), inputs)
    if dynamic:
        built.options["dynamic"] = True
    if variant == "sharded loss":
        built.loss, built.around = _loss(model, mesh["tp"], masked), loss_parallel
    if variant == "mixed precision" and _by_ddp(parallelism):
        built.loss = torch.autocast(device_type, torch.bfloat16)(built.loss)
    return built


def _tokens(config: LlamaConfig, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    indices = torch.arange(batch * (length + 1)).reshape(batch, length + 1) % config.vocab
    return indices[:, :-1].contiguous(), indices[:, 1:].contiguous()


def _by_ddp(parallelism: str) -> bool:
    return parallelism in ("replicate (DDP)", "DDP")


def _spread(model: nn.Module, mesh: DeviceMesh, config: LlamaConfig, sharded_loss: bool) -> None:
    tensor_parallel(model, mesh)
    if (
        sharded_loss
    ):  # hooks of the first plan stay, so that a second plan for the output has to start from a fresh layer
        model.output = nn.Linear(config.dim, config.vocab, bias=False, device=mesh.device_type)
        plan = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh, {"output": plan})


def _wrapped(parallelism: str, model: nn.Module, mesh: DeviceMesh, mixed: bool) -> nn.Module:
    if parallelism == "DDP":
        return DistributedDataParallel(model)
    if parallelism == "replicate (DDP)":
        return replicate_by_ddp(model)
    shard = replicate if parallelism == "replicate" else fully_shard
    dims = mesh["dp"] if "dp" in mesh.mesh_dim_names else mesh
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if mixed
        else MixedPrecisionPolicy()
    )
    for block in model.blocks:
        shard(block, mesh=dims, mp_policy=policy)
    return shard(model, mesh=dims, mp_policy=policy)


def _loss(model: nn.Module, mesh: DeviceMesh | None, masked: bool) -> Callable[..., torch.Tensor]:
    """Mean cross entropy of the model; on sharded logits where a mesh is given.

    Args:
        masked: a position sees those before it that are no padding, token 0, and itself.
    """

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(tokens, mask=_mask(tokens) if masked else None).flatten(0, 1).float()
        labels = targets.flatten()
        if mesh is not None:
            labels = DTensor.from_local(labels, mesh, [Replicate()], run_check=False)
        return F.cross_entropy(logits, labels)

    return loss


def _mask(tokens: torch.Tensor) -> torch.Tensor:
    """(batch, 1, sequence, sequence)"""
    places = torch.arange(tokens.size(1), device=tokens.device)
    own, before = places[:, None] == places, places[:, None] > places
    return (own | before & (tokens != 0)[:, None])[:, None]
