"""Parameters and buffers of a model, replaced in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtensor_compile.compat.dynamo.recurrent_functions import take_new_weights


def replace_tensors(model: nn.Module, made: Mapping[int, torch.Tensor]) -> None:
    """Puts other tensors in place of parameters and buffers of a model, wherever a module holds them.

    Args:
        made: by identity of a tensor, the one that takes its place.
    """
    for owner in model.modules():
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for held in tables:
            held.update({name: made[id(tensor)] for name, tensor in held.items() if id(tensor) in made})
        if isinstance(owner, nn.RNNBase):
            take_new_weights(owner)


__all__ = ["replace_tensors"]
