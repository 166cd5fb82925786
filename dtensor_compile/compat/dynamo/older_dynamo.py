"""Calls that Dynamo traces since 2.13, traced on older releases while our backend traces.

- ``DTensor.from_local``, ``to_local`` and ``redistribute`` are nodes of the graph with the mesh and the placements as
  arguments. Older releases bake these into a new function, which takes no keyword for the local tensor, and which no
  cache keeps.
- Functions of sizes that are integers return integers.
- ``torch.autograd.grad`` takes DTensors, and a gather along a dim other than the first is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._prims_common import make_contiguous_strides_for
from torch._utils import _maybe_view_chunk_cat
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.apply_patches import on_this_thread, patched, patched_entries
from dtensor_compile.compat.dynamo.trackers.calls import handle_calls
from dtensor_compile.compat.dynamo.trackers.constant_objects import OPAQUE
from dtensor_compile.compat.dynamo.trackers.opaque_trackers import tensor_methods
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, build
from dtensor_compile.compat.patches import needs, patch


def _of_numbers(function: Callable[..., Any]) -> tuple[Any, Retrack]:
    """An entry that evaluates calls of `function` with constants."""

    def call(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        given = [*args, *kwargs.values()]
        if not all(value.is_python_constant() for value in given):
            return stock.call_function(tx, args, kwargs)
        named = {name: value.as_python_constant() for name, value in kwargs.items()}
        return build(tx, function(*(value.as_python_constant() for value in args), **named))

    return function, handle_calls(call)


#: Entries for `compat.dynamo.tracing.Entries`.
OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    () if OPAQUE else tuple(map(_of_numbers, (torch.sym_min, torch.sym_max, make_contiguous_strides_for)))
)


def _as_a_node(*_: Any, **__: Any) -> None:
    """A handler that leaves a call to Dynamo's default for functions and tensor methods."""


def _tensors_with_sources(
    stock: Callable[..., Any], variable: VariableTracker
) -> list[tuple[torch.Tensor, str | None]]:
    """The tensors given to ``torch.autograd.grad``, with their sources; torch's version rejects subclasses."""
    variable = variable.realize()
    if isinstance(variable, BaseListVariable):
        return [pair for item in variable.items for pair in _tensors_with_sources(stock, item)]
    if not isinstance(variable, TensorVariable):
        return stock(variable)
    return [(variable.as_proxy().node.meta["example_value"], variable.source.name if variable.source else None)]


_HANDLERS = patch("torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers", "")
_RULES = patch("torch._dynamo.trace_rules:get_torch_obj_rule_map", "")
_COLLECT = patch("torch._dynamo.variables.torch:_collect_tensors_with_sources", "var")


@needs(
    "DTensors and torch.autograd.grad as Dynamo traces them since 2.13",
    _HANDLERS,
    _RULES,
    _COLLECT,
    without="more programs break the graph",
    upstream="fixed in 2.13",
    remove_when="2.11 is no longer supported",
)
@contextlib.contextmanager
def _traced_as_of_2_13() -> Iterator[None]:
    handlers = TorchInGraphFunctionVariable._get_handlers()
    from_local = on_this_thread(handlers[DTensor.from_local], _as_a_node)
    with (
        patched_entries(_HANDLERS, {DTensor.from_local: from_local}, handlers),
        patched_entries(_RULES, {_maybe_view_chunk_cat: UserFunctionVariable}, trace_rules.get_torch_obj_rule_map()),
        patched(_COLLECT, _tensors_with_sources),
        tensor_methods(to_local=_as_a_node, redistribute=_as_a_node),
    ):
        yield


CONTEXTS = () if OPAQUE else (_traced_as_of_2_13,)
