"""Trackers, contexts and graph functions of annotations, which extend the backend. Nothing else in the backend depends
on annotations.

Recurrent layers are calls of one operator of the graph in programs with annotations (`spmd.recurrent`), and left to
torch in others."""

from __future__ import annotations

import contextlib

import torch

from dtensor_compile.compat.dynamo.recurrent_functions import FUNCTIONS, taken_into_graphs
from dtensor_compile.compat.dynamo.trackers.calls import handle_calls
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Contexts, Objects, Retrack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    VariableTracker,
    function_variable,
    graph_break,
)
from dtensor_compile.spmd.annotate import anything_is_marked, plain_tensors_are_replicated
from dtensor_compile.spmd.barrier import border
from dtensor_compile.spmd.constraint import (
    agree,
    constrain,
    ones_of,
    replicated,
    update_statistics,
    whole,
    whole_copy,
    write_whole,
)
from dtensor_compile.spmd.manual import from_manual, placed_from_manual, to_manual
from dtensor_compile.spmd.recurrent import IN_PROGRAMS, recurrent_layer


def _polyfill(kind: str) -> Retrack:
    def call(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if (
            not anything_is_marked() or kind == "gru" and torch.is_autocast_enabled("cpu")
        ):  # which casts inside of that layer on a CPU
            return stock.call_function(tx, args, kwargs)
        if not args[3].is_python_constant():  # a list of weights: packed sequences of several lengths
            graph_break("packed-sequence", kind)
        return function_variable(IN_PROGRAMS[kind]).call_function(tx, args, kwargs)

    return handle_calls(call)


def _taken_with_annotations() -> contextlib.AbstractContextManager[None]:
    return taken_into_graphs() if anything_is_marked() else contextlib.nullcontext()


OBJECTS: Objects = tuple((function, _polyfill(kind)) for kind, function in FUNCTIONS.items())
CONTEXTS: Contexts = (_taken_with_annotations, plain_tensors_are_replicated)

#: Functions in a Dynamo graph whose arguments fully determine their effect (`capture.cacheable`).
GRAPH_FUNCTIONS = (
    agree, border, constrain, from_manual, ones_of, placed_from_manual, recurrent_layer, replicated, to_manual,
    update_statistics, whole,
    whole_copy, write_whole,
)  # fmt: skip
