"""Gradients that wait for the reduction of a later backward pass: accumulation without communication, as operators of a
graph.

    hold_gradient(Tensor grad, Tensor holder, int index, str placements, int order) -> Tensor
        nothing
    with_held_gradient(Tensor grad, Tensor holder, int index, int order) -> Tensor
        grad, and the held gradient, which is released
    hold_shard, with_held_shard
        the same of shards that wait for replicas

`holder` is an integer that identifies the owner of the gradients (`compat.distributed.fsdp_gradients.make_holders`), an
input of the graph, so that code compiled once serves every module of its kind; `index` is the place of the parameter;
`placements` are those of the gradient, where the parameter is a DTensor. Held gradients are looked up where eager keeps
them when the backward pass runs; a forward without a backward changes nothing. `order` is the place among all that has
an effect: no node is dropped, runs twice, or is taken for another.
"""

from __future__ import annotations

import torch

from dtensor_compile.compat.distributed import fsdp_gradients
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.ops.c10d import define


def _hold(grad: torch.Tensor, holder: torch.Tensor, index: int, placements: str, order: int) -> torch.Tensor:
    fsdp_gradients.add_to_held(int(holder), index, grad, parse_spec(placements) if placements else ())
    return torch.empty(0)


def _with_held(grad: torch.Tensor, holder: torch.Tensor, index: int, order: int) -> torch.Tensor:
    return fsdp_gradients.release(int(holder), index, grad)


hold_gradient = define(
    "hold_gradient",
    "(Tensor grad, Tensor holder, int index, str placements, int order) -> Tensor",
    _hold,
    lambda *_: torch.empty(0),
)
with_held_gradient = define(
    "with_held_gradient",
    "(Tensor grad, Tensor holder, int index, int order) -> Tensor",
    _with_held,
    lambda grad, *_: grad.new_empty(grad.shape),
)


def _hold_shard(grad: torch.Tensor, holder: torch.Tensor, index: int, order: int) -> torch.Tensor:
    fsdp_gradients.hold_shard(int(holder), index, grad)
    return torch.empty(0)


def _with_held_shard(grad: torch.Tensor, holder: torch.Tensor, index: int, order: int) -> torch.Tensor:
    return fsdp_gradients.release_shard(int(holder), index, grad)


hold_shard = define(
    "hold_shard", "(Tensor grad, Tensor holder, int index, int order) -> Tensor", _hold_shard, lambda *_: torch.empty(0)
)
with_held_shard = define(
    "with_held_shard",
    "(Tensor grad, Tensor holder, int index, int order) -> Tensor",
    _with_held_shard,
    lambda grad, *_: grad.new_empty(grad.shape),
)

#: Operators with their place in the order as their last argument.
HOLDS = (hold_gradient, with_held_gradient, hold_shard, with_held_shard)
