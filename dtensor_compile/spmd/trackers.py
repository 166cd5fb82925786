"""Recurrent layers: in programs with annotations calls of one operator of the graph (`spmd.recurrent`), in others left to torch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from dtensor_compile.compat.dynamo.tracing import Retrack, Translator, UserFunctionVariable, VariableTracker, graph_break
from dtensor_compile.compat.dynamo.calls import handle_calls
from dtensor_compile.compat.dynamo.recurrent import FUNCTIONS, taken_into_graphs
from dtensor_compile.spmd.annotate import anything_is_marked
from dtensor_compile.spmd.recurrent import IN_PROGRAMS


def _twin(kind: str) -> Retrack:
    def call(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if not anything_is_marked() or kind == "gru" and torch.is_autocast_enabled("cpu"):  # which casts inside of that layer on a CPU
            return stock.call_function(tx, args, kwargs)
        if not args[3].is_python_constant():  # a list of weights: sequences of several lengths, one behind the other
            graph_break("packed-sequence", kind)
        return UserFunctionVariable(IN_PROGRAMS[kind]).call_function(tx, args, kwargs)

    return handle_calls(call)


def _taken_with_annotations() -> contextlib.AbstractContextManager[None]:
    return taken_into_graphs() if anything_is_marked() else contextlib.nullcontext()


OBJECTS: tuple[tuple[Any, Retrack], ...] = tuple((function, _twin(kind)) for kind, function in FUNCTIONS.items())
CONTEXTS = (_taken_with_annotations,)
