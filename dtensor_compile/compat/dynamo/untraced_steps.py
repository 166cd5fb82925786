"""Functions of optimizers that torch keeps out of graphs, and their handling under our backend."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.optim.optimizer as _optimizer
from torch._dynamo import graph_break as break_function  # noqa: F401 - a name for `variables.optimizer`
from torch._dynamo.eval_frame import TorchPatcher
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable

from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
)

if TYPE_CHECKING:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable


#: Code of the wrapper of every ``step()``, which breaks the graph twice.
_STEP_CODE = _optimizer._use_grad_for_differentiable(lambda: None).__code__


class _Untraced(SkipFunctionVariable):
    """A function that torch keeps out of graphs, but that we can trace."""

    @classmethod
    def retrack(cls, stock: VariableTracker) -> VariableTracker:
        return cls(stock.value, stock.reason, source=stock.source) if isinstance(stock, SkipFunctionVariable) else stock


class BreakAroundStep(_Untraced):
    """``torch._dynamo.graph_break``: does nothing in the wrapper of an optimizer's ``step()``."""

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if tx.f_code is _STEP_CODE:
            return ConstantVariable.create(None)
        return super().call_function(tx, list(args), kwargs)


def step_count(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """The step count of an optimizer: eager reads a double-precision number from a tensor on the CPU.

    torch keeps the single-precision tensor, and corrects the averages of a step with it.
    """
    value = args[0].realize() if len(args) == 1 else None
    if isinstance(value, TensorVariable) and value.device == torch.device("cpu"):
        return value.call_method(tx, "double", [], {})
    return stock.call_function(tx, args, kwargs)


def traced(stock: VariableTracker) -> VariableTracker:
    """Traces a function that torch treats as an operator as ordinary code: torch loses writes to the dict that it
    makes."""
    return UserFunctionVariable(cast("TorchInGraphFunctionVariable", stock).value, source=stock.source)


class FusedStep(_Untraced):
    """A fused step, which torch keeps out of graphs: replaced by the equivalent multi-tensor step.

    That one does not support the scale of a `GradScaler`, which a fused step undoes itself; such a step stays out of
    the graph.
    """

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        bound = inspect.signature(self.value).bind(*args, **kwargs).arguments
        if any(not bound[name].is_constant_none() for name in ("grad_scale", "found_inf")):
            return super().call_function(tx, list(args), kwargs)
        function = inspect.unwrap(self.value)
        multi_tensor = function.__globals__[function.__name__.replace("_fused_", "_multi_tensor_")]
        return UserFunctionVariable(multi_tensor).call_function(tx, list(args), kwargs)


def fused_steps() -> tuple[Any, ...]:
    """The functions for fused steps, which torch excludes from graphs (at its first compilation, which is running)."""
    TorchPatcher.patch()
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.optim.")]
    found = [getattr(module, name) for module in modules for name in vars(module) if name.startswith("_fused_")]
    return tuple({id(function): function for function in found if hasattr(function, "_torchdynamo_disable")}.values())
