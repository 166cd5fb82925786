"""Functions of optimizers that torch keeps out of graphs, and what a call of one is under our backend."""

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

from dtensor_compile.compat.dynamo.tracker_tools import (
    Translator,
)

if TYPE_CHECKING:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable


#: Code of the wrapper that every ``step()`` has, with the two breaks in it.
_STEP_CODE = _optimizer._use_grad_for_differentiable(lambda: None).__code__


class _Untraced(SkipFunctionVariable):
    """A function that torch keeps out of graphs, and that has a meaning in one all the same."""

    @classmethod
    def retrack(cls, stock: VariableTracker) -> VariableTracker:
        return cls(stock.value, stock.reason, source=stock.source) if isinstance(stock, SkipFunctionVariable) else stock


class BreakAroundStep(_Untraced):
    """``torch._dynamo.graph_break``: does nothing where the wrapper of an optimizer's ``step()`` calls it."""

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if tx.f_code is _STEP_CODE:
            return ConstantVariable.create(None)
        return super().call_function(tx, list(args), kwargs)


def step_count(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """How many steps an optimizer made: eager reads a number of double precision out of a tensor on the CPU.

    torch keeps the tensor of single precision, and what corrects the averages of a step with it.
    """
    value = args[0].realize() if len(args) == 1 else None
    if isinstance(value, TensorVariable) and value.device == torch.device("cpu"):
        return value.call_method(tx, "double", [], {})
    return stock.call_function(tx, args, kwargs)


def traced(stock: VariableTracker) -> VariableTracker:
    """A function that torch takes for an operator, and that is code like other code: of the dict that it makes, torch
    loses what is written to it.
    """
    return UserFunctionVariable(cast("TorchInGraphFunctionVariable", stock).value, source=stock.source)


class FusedStep(_Untraced):
    """A fused step, which torch keeps out of graphs: the step over lists, which computes the same, takes its place.

    It cannot take the scale of a `GradScaler`, which a fused step undoes itself; that one stays out of the graph.
    """

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        bound = inspect.signature(self.value).bind(*args, **kwargs).arguments
        if any(not bound[name].is_constant_none() for name in ("grad_scale", "found_inf")):
            return super().call_function(tx, list(args), kwargs)
        function = inspect.unwrap(self.value)
        twin = function.__globals__[function.__name__.replace("_fused_", "_multi_tensor_")]
        return UserFunctionVariable(twin).call_function(tx, list(args), kwargs)


def fused_steps() -> tuple[Any, ...]:
    """The functions for fused steps, which torch keeps out of graphs (from its first compilation on, which is under
    way).
    """
    TorchPatcher.patch()
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.optim.")]
    found = [getattr(module, name) for module in modules for name in vars(module) if name.startswith("_fused_")]
    return tuple({id(function): function for function in found if hasattr(function, "_torchdynamo_disable")}.values())
