"""torchtitan's own `apply_compile` and loss take the backend's name; blocks and whole models train as in eager."""

import pytest
import torch

from dtensor_compile.testing import make_mesh, run_on_ranks
from tests.integrations.models import graphs

pytest.importorskip("torchtitan", reason="torchtitan is not installed")


def build(layout):
    from torch.distributed.fsdp import fully_shard
    from torchtitan.models.llama3.infra.parallelize import apply_tp
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    torch.manual_seed(0)
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128, "max_seq_len": 32}
    model = Transformer(TransformerModelArgs(**sizes, attn_type="sdpa"))
    with torch.no_grad():
        model.init_weights()
    mesh = make_mesh((2,), ("tp" if layout == "tp" else "fsdp",))
    if layout == "tp":
        apply_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False)
    return model, (lambda module: fully_shard(module, mesh=mesh)) if layout == "fsdp" else (lambda module: module)


def train(layout, unit, backend):
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3.infra.parallelize import apply_compile

    job = JobConfig()
    job.compile.enable, job.compile.backend = backend is not None, backend or "inductor"
    model, shard = build(layout)
    if backend and unit == "block":
        apply_compile(model, job.compile)
    for block in model.layers.values():
        shard(block)
    shard(model)
    if backend and unit == "whole":
        model.compile(backend=backend)
    loss_of = build_cross_entropy_loss(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank() if layout == "fsdp" else 0)
    losses = []
    for _ in range(3):
        tokens = torch.randint(128, (2, 32), generator=generator)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_both(layout, unit, backend):
    graphs()
    eager = train(layout, unit, None)
    assert graphs() == (0, [])
    return eager, train(layout, unit, backend), *graphs()


@pytest.mark.parametrize("layout", ["tp", "fsdp"])
@pytest.mark.parametrize("unit", ["block", "whole"])
def test_llama_trains_like_eager(layout, unit):
    for eager, compiled, compiles, breaks in run_on_ranks(2, train_both, layout, unit, "dtensor_aten"):
        torch.testing.assert_close(compiled, eager)
        assert compiles > 1 and not breaks  # the model and the loss


def flex_both(layout, unit):
    """A forward pass with FlexAttention, of which torch has no backward for CPUs, and no kernel inside of a larger graph."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.config import JobConfig
    from torchtitan.models.attention import get_causal_mask_mod
    from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_tp
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    torch.manual_seed(0)
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128, "max_seq_len": 128}
    model = Transformer(TransformerModelArgs(**sizes, attn_type="flex"))
    job = JobConfig()
    job.compile.backend = "dtensor_aten"
    with torch.no_grad():
        model.init_weights()
        mesh = make_mesh((2,), (layout,))
        if layout == "tp":
            apply_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False)
        arguments = torch.randint(128, (2, 128)), create_block_mask(get_causal_mask_mod(), 2, None, 128, 128, device="cpu")
        eager = model(arguments[0], attention_masks=arguments[1])  # in which torchtitan compiles the attention alone, by Inductor
        graphs()
        if unit == "block":
            apply_compile(model, job.compile)
        if layout == "fsdp":
            for block in model.layers.values():
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if unit == "whole":
            model.compile(backend="dtensor_aten", fullgraph=True)
        return eager, model(arguments[0], attention_masks=arguments[1]), *graphs()


@pytest.mark.parametrize("layout, unit", [("tp", "block"), ("fsdp", "whole")])
def test_flex_attention_is_part_of_the_graph(layout, unit):
    for eager, compiled, compiles, breaks in run_on_ranks(2, flex_both, layout, unit):
        torch.testing.assert_close(compiled, eager)
        assert compiles >= 1 and not breaks
