"""Recurrent layers in programs with annotations: one operator in the graph, which runs on shards of the batch.

Dynamo leaves torch's recurrent layers out of graphs, and DTensor has no rule for them. In programs with annotations
they are calls of `recurrent_layer`, one for all time steps and stacked layers:

    y, h, c = recurrent_layer("lstm", x, (h0, c0), weights, ...)

Each time step needs all features of the one before; sequences of a batch are independent. A device therefore runs
torch's own function on its part of the batch, with full weights. Only the sums of the weights' gradients are
communicated, as in a linear layer. The backward recomputes the forward.

Dropout between stacked layers is drawn between calls of one layer each, as torch does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dtensor_compile.compat.dtensor.rules.factors import Factor
from dtensor_compile.compat.dynamo.recurrent_functions import FUNCTIONS, gradients
from dtensor_compile.spmd.constraint import as_dtensor

_library = torch.library.Library("dtensor_compile", "FRAGMENT")
_ARGUMENTS = (
    "str kind, Tensor x, Tensor[] states, Tensor[] weights, bool biases, int layers, bool bidirectional, bool "
    "batch_first"
)
_library.define(f"recurrent({_ARGUMENTS}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    f"recurrent_backward(Tensor[] gradients, {_ARGUMENTS}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)

recurrent_op = torch.ops.dtensor_compile.recurrent.default


class _Options(NamedTuple):
    """The last arguments of both operators."""

    biases: bool
    layers: int
    bidirectional: bool
    batch_first: bool


def _run(
    kind: str,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    options: _Options,
    train: bool,
) -> list[torch.Tensor]:
    given = list(states) if kind == "lstm" else states[0]
    biases, layers, *layout = options
    return list(FUNCTIONS[kind](x, given, list(weights), biases, layers, 0.0, train, *layout))


def _forward(
    kind: str, x: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *options: Any
) -> list[torch.Tensor]:
    made = _empty(kind, x, states, weights, *options)
    if x.numel():
        for to, value in zip(made, _run(kind, x, states, weights, _Options(*options), False)):
            to.copy_(value)
    return made


def _empty(
    kind: str, x: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *options: Any
) -> list[torch.Tensor]:
    """Empty results: y of shape (time, batch, features), or a view of it of shape (batch, time, features), and the last
    states.
    """
    given = _Options(*options)
    first, second = x.shape[:2]
    steps, batch = (second, first) if given.batch_first else (first, second)
    y = x.new_empty([steps, batch, states[0].shape[2] * (1 + given.bidirectional)])
    return [
        y.transpose(0, 1) if given.batch_first else y,
        *(torch.empty_like(s, memory_format=torch.contiguous_format) for s in states),
    ]


def _backward(
    gradients_of_results: Sequence[torch.Tensor],
    kind: str,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *options: Any,
) -> list[torch.Tensor]:
    inputs, n = [x, *states, *weights], len(states)
    if not x.numel():
        return [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in inputs]

    def run(x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_run(kind, x, others[:n], others[n:], _Options(*options), True))

    return [g.contiguous().clone() for g in gradients(run, inputs, gradients_of_results)]


_library.impl("recurrent", _forward, "CompositeExplicitAutograd")
_library._register_fake("recurrent", _empty)
_library.impl("recurrent_backward", _backward, "CompositeExplicitAutograd")
_library._register_fake(
    "recurrent_backward",
    lambda gradients, kind, x, states, weights, *_: [
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *states, *weights)
    ],
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    kind, x, states, weights, *ctx.options = inputs
    ctx.kind, ctx.counts = kind, (len(states), len(weights))
    ctx.save_for_backward(x, *states, *weights)


def _gradients(ctx: Any, of_results: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    x, *others = ctx.saved_tensors
    n, _ = ctx.counts
    states, weights = others[:n], others[n:]
    shapes = _empty(ctx.kind, x, states, weights, *ctx.options)
    given = [torch.zeros_like(made) if g is None else g for g, made in zip(of_results, shapes)]
    found = torch.ops.dtensor_compile.recurrent_backward(given, ctx.kind, x, states, weights, *ctx.options)
    return None, found[0], found[1 : n + 1], found[n + 1 :], *[None] * len(ctx.options)


torch.library.register_autograd("dtensor_compile::recurrent", _gradients, setup_context=_save, lib=_library)


@torch.compiler.allow_in_graph
def recurrent_layer(
    kind: str,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """The results and the last states of stacked layers (see the module docstring).

    Args:
        kind: a name of `compat.dynamo.recurrent_functions.FUNCTIONS`.
        x: of shape (time, batch, features), or (batch, time, features) with `batch_first`.
        states: first states, each of shape (layers * directions, batch, features); two for an LSTM.
    """
    options = biases, layers, bidirectional, batch_first
    first = next((t for t in (x, *states, *weights) if isinstance(t, DTensor)), None)
    if first is None:
        return tuple(recurrent_op(kind, x, list(states), list(weights), *options))
    mesh, batch = first.device_mesh, 0 if batch_first else 1
    x = as_dtensor(x, mesh)
    cut = batch_cuts(x, batch)
    of_states: list[Placement] = [Shard(1) if p.is_shard() else p for p in cut]
    partial: list[Placement] = [Partial() if p.is_shard() else p for p in cut]
    here = [_local(x, cut, cut), *(_local(as_dtensor(s, mesh), of_states, of_states) for s in states)]
    whole = [_local(as_dtensor(w, mesh), [Replicate()] * mesh.ndim, partial) for w in weights]
    made = recurrent_op(kind, here[0], here[1:], whole, *options)
    features = made[0].shape[2]
    shapes = [[*x.shape[:2], features], *([s.shape[0], x.shape[batch], s.shape[2]] for s in states)]
    return tuple(
        DTensor.from_local(
            t, mesh, p, run_check=False, shape=torch.Size(shape), stride=_strides(shape, i == 0 and batch_first)
        )
        for i, (t, p, shape) in enumerate(zip(made, [cut, *[of_states] * len(states)], shapes))
    )


def batch_cuts(x: DTensor, batch: int) -> list[Placement]:
    """The placements of a tensor, replicated along mesh dims that shard a dim other than the batch."""
    return [p if p == Shard(batch) else Replicate() for p in x.placements]


def _local(t: DTensor, placements: Sequence[Placement], of_gradient: Sequence[Placement]) -> torch.Tensor:
    return t.redistribute(placements=placements).to_local(grad_placements=of_gradient)


def _strides(shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return (shape[2], shape[0] * shape[2], 1) if transposed else tuple(strides)


def batch_factor(args: Sequence[Any]) -> list[Factor]:
    """The only dim of a recurrent operator with these arguments that may be sharded: the batch."""
    _, _, states, weights, *_, batch_first = args
    dim, n = (0 if batch_first else 1), len(states)
    return [Factor((dim, *[1] * n, *[None] * len(weights)), (dim, *[1] * n), False)]


def _function(kind: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    def function(  # noqa: PLR0913, PLR0917 - the parameters of torch's function
        x: torch.Tensor,
        states: Any,
        weights: Sequence[torch.Tensor],
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        given, weights = list(states) if kind == "lstm" else [states], list(weights)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, given, weights = x.to(dtype), [s.to(dtype) for s in given], [w.to(dtype) for w in weights]
        if not (dropout and train and layers > 1):
            return recurrent_layer(kind, x, given, weights, biases, layers, bidirectional, batch_first)
        x = x.transpose(0, 1) if batch_first else x
        directions, n = 1 + bidirectional, len(weights) // layers
        last = []
        for i in range(layers):
            begin = [s[i * directions : (i + 1) * directions] for s in given]
            x, *end = recurrent_layer(kind, x, begin, weights[i * n : (i + 1) * n], biases, 1, bidirectional, False)
            last.append(end)
            x = F.dropout(x, dropout, True) if i < layers - 1 else x
        return (x.transpose(0, 1) if batch_first else x, *(torch.cat(parts) for parts in zip(*last)))

    return function


#: Name of a function of torch -> its replacement in programs with annotations.
IN_PROGRAMS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {kind: _function(kind) for kind in FUNCTIONS}
