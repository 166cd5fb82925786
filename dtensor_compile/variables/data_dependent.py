"""Data-dependent values: symbolic scalars of the graph (`compat.dynamo.data_dependent_scalars`), in the contexts of
`CONTEXTS`.

``torch.equal`` returns a Python ``bool``. Its polyfill computes the answer as a tensor and reads it by ``item()``,
which a graph can contain."""

from __future__ import annotations

from typing import Any

import torch

from dtensor_compile.compat.dynamo.data_dependent_scalars import (
    collectives_of_constants,
    lengths_of_counts,
    numbers_in_the_graph,
)
from dtensor_compile.compat.dynamo.trackers.calls import handle_calls
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, VariableTracker, function_variable


def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and values."""
    return x.shape == y.shape and bool((x == y).all())


def _equal(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``torch.equal(x, y)``: calls the polyfill if the dtypes are equal, as torch requires."""
    tensors: list[Any] = [arg.realize() for arg in args]
    if kwargs or len(tensors) != 2 or not all(t.is_tensor() for t in tensors) or tensors[0].dtype != tensors[1].dtype:
        return stock.call_function(tx, args, kwargs)
    return function_variable(equal).call_function(tx, tensors, {})


OBJECTS: tuple[tuple[Any, Retrack], ...] = ((torch.equal, handle_calls(_equal)),)
CONTEXTS = (numbers_in_the_graph, lengths_of_counts, collectives_of_constants)
