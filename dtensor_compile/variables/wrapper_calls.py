"""Utilities shared by the data-parallel wrappers: tensors in their inputs, and tracing of our own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor_compile.compat.dynamo.trackers.module_calls import happens_once, notes
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    VariableTracker,
    build,
    function_variable,
    graph_break,
)


def _for_tensors(change, value):
    """`value` with each tensor replaced by ``change(tensor)``, in containers that torch's wrappers search."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _for_tensors(change, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_for_tensors(change, item) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)([_for_tensors(change, item) for item in value])
    return value


def cast_tensors(value, dtype):
    """Floating-point tensors in `value` in another dtype."""
    return _for_tensors(lambda x: x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x, value)


def move_tensors(value, device):
    """Tensors in `value` on another device."""
    return _for_tensors(lambda x: x.to(device), value)


def trace_function(tx: Translator, function: Callable[..., Any], *args: Any) -> VariableTracker:
    """Traces a function of this package; arguments are trackers or constants."""
    variables = [arg if isinstance(arg, VariableTracker) else build(tx, arg) for arg in args]
    return function_variable(function).call_function(tx, variables, {})


def refuse_setting(why: str | None, what: str) -> None:
    """Breaks the graph at a wrapper (`what`) if `why` names a setting that is not traced; None is no reason."""
    if why is not None:
        graph_break("data-parallel-setting", f"{what}: {why}")


def gathering_name(tx: Translator, owner: Any, module: torch.nn.Module) -> str:
    """Name of the gather of one forward of a wrapped module: that of `owner`, and the number of earlier calls.

    Modules wrapped in one list have one owner, and are gathered together.
    """
    happens_once(tx, "it gathers parameters, or averages gradients, under a name of its own")
    numbers, calls = notes(tx, "owners"), notes(tx, "calls")
    number = numbers.setdefault(id(owner), len(numbers))
    call = calls[id(module)] = calls.get(id(module), -1) + 1
    return f"{type(owner).__name__} {number}, call {call}"
