"""A small Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU. Plain single-device torch; ``parallel.py``
shards it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model. `kv_heads` divides `heads`; `dim` is `heads` times an even head size."""

    layers: int = 4
    dim: int = 256
    ffn_dim: int = 768
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 2048
    sequence: int = 128


class Attention(nn.Module):
    """Causal self-attention with rotary positions; maps (batch, sequence, dim) to the same shape."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        # Head counts come from the tensors, so that the same code runs on a slice of the heads.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rotary), rotate(k, rotary)
        groups = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, mask=mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Maps token indices (batch, sequence) to logits (batch, sequence, vocab); mask: (batch, 1, sequence, sequence)."""

    rotary: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        self.register_buffer("rotary", rotary_table(config.dim // config.heads, config.sequence), persistent=False)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        rotary = self.rotary[: tokens.size(1)]
        for block in self.blocks:
            x = block(x, rotary, mask=mask)
        return self.output(self.norm(x))


def rotary_table(head_dim: int, positions: int, base: float = 10000.0) -> torch.Tensor:
    """Cosines and sines of the rotary embedding, (positions, 2, head_dim / 2) (Su et al., RoFormer, eq. 15)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of each head against each other by its position; x is (batch, heads, sequence, head_dim).
    The angles are float32 in models of any dtype."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = rotary.unbind(1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)
