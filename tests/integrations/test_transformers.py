"""Mixtures of experts of transformers: one graph, eager's numbers, no more collectives; also where a rank's experts get
no token.
"""

import warnings

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from dtensor_compile.testing import run_on_ranks
from dtensor_compile.testing.count_collectives import collectives_run
from tests.integrations.models import graphs

pytest.importorskip("transformers", reason="transformers is not installed (the gallery's environment has it)")

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "use_cache": False,
}  # fmt: skip


def _model(kind, placed, crowded):
    """A model of transformers from a configuration, distributed as `placed` says; `crowded`: the first rank's experts
    get all tokens.
    """
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if kind == "mixtral":
        config, cls = MixtralConfig(**SIZES, num_local_experts=4), MixtralForCausalLM
    else:
        experts = {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
        config, cls = Qwen3MoeConfig(**SIZES, **experts), Qwen3MoeForCausalLM
    torch.manual_seed(0)
    placed, _, meshes = cls.prepare_distribute_model(placed)
    model = cls.maybe_distribute_model(cls(config), placed, meshes)
    if crowded:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.zero_()
    return model


def _trained(model, compiled, steps):
    """Losses, gradients and the collectives of a step, over batches that differ between ranks and steps."""

    def loss(tokens):
        return model(tokens, labels=tokens).loss

    run = torch.compile(loss, backend="dtensor_aten", fullgraph=True) if compiled else loss
    torch.manual_seed(1 + dist.get_rank() * (model._fsdp_size > 1))
    losses = []

    def step(tokens):
        result = run(tokens)
        result.backward()
        return result.item()

    for _ in range(steps):
        tokens = torch.randint(128, (2, 16))
        model.zero_grad()
        sent = collectives_run(lambda: losses.append(step(tokens)))
    gradients = {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()
    }
    return losses, gradients, sent


def experts(kind, sizes, crowded):
    from transformers.distributed import DistributedConfig

    from dtensor_compile.integrations.transformers import all_to_all_without_branches

    all_to_all_without_branches()
    placed = DistributedConfig(**sizes)
    losses, gradients, sent = _trained(_model(kind, placed, crowded), False, 3)
    torch._dynamo.reset()
    graphs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, our_gradients, our_sent = _trained(_model(kind, placed, crowded), True, 3)
    assert not [str(w.message) for w in caught if "dropped" in str(w.message)]
    torch.testing.assert_close(ours, losses)
    torch.testing.assert_close(our_gradients, gradients)
    found, breaks = graphs()
    assert not breaks
    return found, sent, our_sent


@pytest.mark.parametrize(
    "kind, crowded",
    [
        ("qwen3", True),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
        pytest.param("mixtral", True, marks=pytest.mark.slow),
    ],
)
def test_all_to_all_under_fully_shard(kind, crowded):
    sizes = {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"}
    for found, sent, ours in run_on_ranks(2, experts, kind, sizes, crowded, timeout=200):
        assert found == 1
        assert 0 < ours <= sent


@pytest.mark.parametrize("implementation", ["auto", pytest.param("all_reduce", marks=pytest.mark.slow)])
def test_experts_beside_tensor_parallel(implementation):
    sizes = {"tp_size": 2, "ep_size": 2, "ep_implementation": implementation}
    for found, sent, ours in run_on_ranks(2, experts, "mixtral", sizes, False, timeout=200):
        assert found == 1
        assert 0 < ours <= sent
