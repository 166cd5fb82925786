"""Lists of tensors flattened into one tensor and back, as in code for gradient buckets.

torch's functions for it are written in C++ and cannot be traced if a size is symbolic; these use tensor operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtensor_compile.compat.distributed.functional_collectives import flatten_dense_tensors, unflatten_dense_tensors
from dtensor_compile.compat.dynamo.trackers.calls import handle_calls
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, VariableTracker, function_variable


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenation of the elements of `tensors`, one-dimensional."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views of consecutive parts of `flat`, with the shapes of `tensors`."""
    parts, start = [], 0
    for tensor in tensors:
        parts.append(flat.narrow(0, start, tensor.numel()).view(tensor.shape))
        start = start + tensor.numel()
    return tuple(parts)


def _polyfill(function: Any) -> Retrack:
    def call(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        return function_variable(function).call_function(tx, args, kwargs)

    return handle_calls(call)


OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    (flatten_dense_tensors, _polyfill(flatten)),
    (unflatten_dense_tensors, _polyfill(unflatten)),
)
