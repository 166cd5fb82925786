"""Models that nobody here wrote, under the wrappers of their users; from configurations, without weights. For
`wrappers.py`.

They need ``transformers`` (`make bench-third-party` runs in the environment of the gallery, which has it); where it is
missing there are none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import nn

#: What makes a model, and what makes its input.
Makers = tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]


def llama(layers: int, dim: int, ffn_dim: int, vocab: int, heads: int = 8, family: str = "Llama") -> nn.Module:
    """A causal language model; `family` is one whose configuration takes the sizes of Llama's, as ``"Qwen2"``."""
    import transformers

    sizes = {"hidden_size": dim, "intermediate_size": ffn_dim, "num_hidden_layers": layers, "vocab_size": vocab}
    made = getattr(transformers, f"{family}Config")
    config = made(num_attention_heads=heads, num_key_value_heads=4, use_cache=False, **sizes)
    config._attn_implementation = "sdpa"
    return getattr(transformers, f"{family}ForCausalLM")(config)


def vit(layers: int, dim: int, image: int, patch: int, heads: int = 4) -> nn.Module:
    """A vision transformer of ten classes."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        "hidden_size": dim,
        "intermediate_size": 4 * dim,
        "num_hidden_layers": layers,
        "image_size": image,
        "patch_size": patch,
    }
    return ViTForImageClassification(ViTConfig(num_attention_heads=heads, num_labels=10, **sizes))


def _resnet(depths: list[int], dims: list[int]) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": dims[0], "hidden_sizes": dims, "depths": depths}
    return ResNetForImageClassification(ResNetConfig(layer_type="basic", num_labels=10, **sizes))


_AVAILABLE = importlib.util.find_spec("transformers") is not None
#: Under ``fully_shard``, each decoder layer and the whole. Those called small are for a network of which only the
#: latency counts.
SHARDED: dict[str, Makers] = (
    {
        "fully_shard, small HF Llama": (lambda: llama(2, 64, 192, 256), lambda: torch.randint(256, (2, 32))),
        "fully_shard, HF Llama": (lambda: llama(8, 512, 1536, 2048), lambda: torch.randint(2048, (2, 256))),
    }
    if _AVAILABLE
    else {}
)
#: Under ``DistributedDataParallel``.
REPLICATED: dict[str, Makers] = (
    {
        "DDP, small HF ViT": (lambda: vit(4, 64, 32, 8), lambda: torch.randn(2, 3, 32, 32)),
        # DeiT-tiny: one bucket of DDP's.
        "DDP, HF DeiT-tiny": (lambda: vit(12, 192, 224, 16, heads=3), lambda: torch.randn(2, 3, 224, 224)),
        "DDP, HF ViT": (lambda: vit(6, 384, 64, 8), lambda: torch.randn(8, 3, 64, 64)),
        "DDP, small HF ResNet": (lambda: _resnet([2, 2], [16, 32]), lambda: torch.randn(2, 3, 64, 64)),
        "DDP, HF ResNet18": (lambda: _resnet([2, 2, 2, 2], [64, 128, 256, 512]), lambda: torch.randn(4, 3, 64, 64)),
    }
    if _AVAILABLE
    else {}
)
