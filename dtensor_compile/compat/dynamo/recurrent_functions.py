"""torch's recurrent layers: their functions, and whether Dynamo traces them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import config

from dtensor_compile.compat.apply_patches import patched_values
from dtensor_compile.compat.patches import hook, needs, patch

#: Functions of recurrent layers by name: ``(x, states, weights, biases, layers, dropout, train, bidirectional,
#: batch_first)``.
FUNCTIONS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    name: getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}


_FUNCTIONS = {name: patch(f"torch._VF:{name}", optional=True) for name in FUNCTIONS}


@needs(
    "recurrent layers in graphs",
    hook("torch._dynamo.config:allow_rnn"),
    *_FUNCTIONS.values(),
    hook("torch.nn.modules.rnn:RNNBase._init_flat_weights", "self"),
    without="recurrent layers run outside of graphs, on whole tensors",
    upstream="#158007, #185902",
    remove_when="allow_rnn is on by default and DTensor has rules for recurrent operators",
)
@contextlib.contextmanager
def taken_into_graphs() -> Iterator[None]:
    """While active, Dynamo traces recurrent layers, which it otherwise leaves out of graphs."""
    with config.patch(allow_rnn=True):
        yield


@contextlib.contextmanager
def replaced(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While active, recurrent layers call these functions instead of torch's."""
    with patched_values({_FUNCTIONS[name]: function for name, function in functions.items()}):
        yield


def take_new_weights(layer: nn.RNNBase) -> None:
    """Makes a layer use its new parameters."""
    layer._init_flat_weights()


def gradients(
    function: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Sequence[torch.Tensor],
    gradients_of_results: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The gradients of ``function(*inputs)`` for its inputs, computed inside a kernel, where autograd is off."""
    key = torch._C.DispatchKey
    with (
        torch.enable_grad(),
        torch._C._SetExcludeDispatchKeyGuard(key.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(key.ADInplaceOrView, False),
    ):
        leaves = [t.detach().requires_grad_() for t in inputs]
        results = function(*leaves)
        found = torch.autograd.grad(results, leaves, gradients_of_results, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(inputs, found)]
