"""Settings of torch that a program changes around a piece of code, through functions in C++ that torch does not trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.node import has_side_effect

from dtensor_compile.compat.dynamo import Retrack, Translator, VariableTracker, build, constant_argument
from dtensor_compile.compat.dynamo_calls import handle_calls

_c10d = torch._C._distributed_c10d


def allow_implicit_replication(allowed: bool) -> None:
    """Whether operators take plain tensors for replicated DTensors; a node of the graph, for who traces the graph once more."""
    torch._C._set_dtensor_allow_implicit_replication(allowed)


has_side_effect(allow_implicit_replication)


def _set_implicit_replication(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    allowed = constant_argument(args[0])
    allow_implicit_replication(allowed)
    tx.output.create_proxy("call_function", allow_implicit_replication, (allowed,), {})
    return build(tx, None)


def _read(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    return build(tx, stock.as_python_constant()())


def _nothing(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """For settings that say nothing about what is in a graph: names of collectives in a profile, works in flight outside."""
    return build(tx, None)


def _functions() -> Iterator[tuple[Any, Retrack]]:
    handlers: dict[tuple[Any, str], Callable[..., VariableTracker]] = {
        (torch._C, "_set_dtensor_allow_implicit_replication"): _set_implicit_replication,
        (torch._C, "_get_dtensor_allow_implicit_replication"): _read,
        (_c10d, "_set_comm_profiling_name"): _nothing,
        (_c10d, "_get_comm_profiling_name"): _read,
        (_c10d, "_set_allow_inflight_collective_as_graph_input"): _nothing,
        (_c10d, "_allow_inflight_collective_as_graph_input"): _read,
    }
    for (module, name), handler in handlers.items():
        if hasattr(module, name):
            yield getattr(module, name), handle_calls(handler)


@contextlib.contextmanager
def _settings_as_before() -> Iterator[None]:
    """A trace that ends early leaves no setting behind."""
    before = torch._C._get_dtensor_allow_implicit_replication()
    try:
        yield
    finally:
        allow_implicit_replication(before)


#: Entries for `compat.dynamo.Entries`.
OBJECTS: tuple[tuple[Any, Retrack], ...] = tuple(_functions())
CONTEXTS = (_settings_as_before,)
