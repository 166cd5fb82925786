"""A linear layer that keeps the dims of its input in the graph.

``torch.nn.functional.linear`` folds the leading dims of its input into one, for a matmul: a shard of the second dim
becomes a strided shard of the folded one. Here the layer is one operator over all dims, with a sharding rule of its
own; the fold happens in its kernel, on the local tensor. (DTensor of torch 2.13 propagates the strided shard through a
matmul: then both send the same.)

    y[..., o] = sum_i x[..., i] w[o, i]            any leading dim, o and i may be sharded; y is partial along i
    w'[o, i]  = sum_... y'[..., o] x[..., i]       gradient of w: partial along sharded leading dims

`with_nd_linear` returns a module with such layers that shares parameters and buffers with the original.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_library = torch.library.Library("dtensor_compile", "FRAGMENT")
_library.define("linear_nd(Tensor x, Tensor w) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define("linear_nd_weight(Tensor g, Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (_rows(x) @ w.t()).reshape(*x.shape[:-1], w.shape[0])


def _weight(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _rows(g).t() @ _rows(x)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """All dims but the last folded into one; the tensor may be empty on some ranks."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


_library.impl("linear_nd", _linear, "CompositeExplicitAutograd")
_library.impl("linear_nd_weight", _weight, "CompositeExplicitAutograd")
_library._register_fake("linear_nd", lambda x, w: x.new_empty([*x.shape[:-1], w.shape[0]]))
_library._register_fake("linear_nd_weight", lambda g, x: g.new_empty([g.shape[-1], x.shape[-1]]))


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = ctx.saved_tensors
    ops = torch.ops.dtensor_compile
    return ops.linear_nd(gradient, w.t()), ops.linear_nd_weight(gradient, x)


torch.library.register_autograd("dtensor_compile::linear_nd", _backward, setup_context=_save, lib=_library)

Choices = list[tuple[list[Placement], list[Placement]]]


@register_sharding(torch.ops.dtensor_compile.linear_nd.default)
def _linear_rule(x: Any, w: Any) -> Choices:
    last = len(x.shape) - 1
    choices: Choices = [([Shard(i)], [Shard(i), Replicate()]) for i in range(last)]
    choices += [([Shard(last)], [Replicate(), Shard(0)]), ([Partial()], [Shard(last), Shard(1)])]
    return [*choices, ([Replicate()], [Replicate(), Replicate()])]


@register_sharding(torch.ops.dtensor_compile.linear_nd_weight.default)
def _weight_rule(g: Any, x: Any) -> Choices:
    last = len(x.shape) - 1
    choices: Choices = [([Partial()], [Shard(i), Shard(i)]) for i in range(last)]
    choices += [([Shard(0)], [Shard(last), Replicate()]), ([Shard(1)], [Replicate(), Shard(last)])]
    return [*choices, ([Replicate()], [Replicate(), Replicate()])]


class NDLinear(nn.Linear):
    """``nn.Linear`` over the operator of this module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `x` of shape (..., in_features) to (..., out_features)."""
        w: torch.Tensor = self.weight
        b: torch.Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, w, b = x.to(dtype), w.to(dtype), b if b is None else b.to(dtype)
        y = torch.ops.dtensor_compile.linear_nd(x, w)
        return y if b is None else y + b


def with_nd_linear(module: nn.Module) -> nn.Module:
    """A copy of a module with `NDLinear` for its linear layers; shares parameters and buffers with the original."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
    made = copy.deepcopy(module, shared)
    for layer in made.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = NDLinear
    return made
