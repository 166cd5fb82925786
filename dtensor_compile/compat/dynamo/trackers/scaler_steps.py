"""Optimizer steps of a gradient scaler, which take effect only if all gradients are finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch._dynamo import graph_break as break_function  # noqa: F401 - a name for `variables.optimizer`
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import ListVariable
from torch.amp import grad_scaler

from dtensor_compile.compat.dynamo.trackers.calls import Call
from dtensor_compile.compat.dynamo.trackers.optimizer_trackers import TracedOptimizerVariable
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    function_variable,
)

if TYPE_CHECKING:
    pass

#: Makes a `GradScaler`'s state of an optimizer.
scaler_state = grad_scaler._refresh_per_optimizer_state


#: Steps if the gradients are finite, which depends on the data.
_step_if_finite = grad_scaler.GradScaler._maybe_opt_step


def step_where_finite(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """A step that a `GradScaler` skips if gradients are infinite: the step runs, and its writes are undone in that
    case.

    Eager reads whether they are infinite, which would break the graph. Compiled code selects each value with ``where``.
    A step with other effects than mutating tensors is traced as in eager.
    """
    optimizer = args[1].realize()
    written = (
        optimizer.written_by_a_step(tx) if isinstance(optimizer, TracedOptimizerVariable) and len(args) == 3 else None
    )
    if written is None or kwargs:
        return tx.inline_user_function_return(cast("UserFunctionVariable", stock), args, kwargs)
    return function_variable(_step_where_finite).call_function(tx, [*args[1:], ListVariable(written)], {})


def _step_where_finite(optimizer: torch.optim.Optimizer, of_scaler: dict[str, Any], written: list[torch.Tensor]) -> Any:
    with torch.no_grad():
        infinite = sum(of_scaler["found_inf_per_device"].values()) != 0
        before = [tensor.clone() for tensor in written]
    result = optimizer.step()
    with torch.no_grad():
        for tensor, old in zip(written, before):
            tensor.copy_(torch.where(infinite.to(tensor.device), old, tensor))
    return result


def steps_of_scalers(function: UserFunctionVariable) -> Call | None:
    """The handler for calls of `function`, if it is the one by which a `GradScaler` steps."""
    return step_where_finite if function.get_function() is _step_if_finite else None
