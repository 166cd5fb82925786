"""Settings that a program changes for a piece of code, through C++ functions that torch does not trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss
from torch.fx.node import has_side_effect

from dtensor_compile.compat.dynamo.trackers.calls import Call, handle_calls
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    VariableTracker,
    build,
    constant_argument,
    constant_source,
    fact_guard,
)
from dtensor_compile.compat.patches import if_there

_c10d = torch._C._distributed_c10d

#: Where torch has ``compile_on_one_rank``: since 2.14 in its compiler's settings, and where it was, with a warning.
_CONFIGS = (if_there("torch.compiler:config"), if_there("torch.distributed:config"))


def compiles_on_one_rank() -> bool:
    """Whether torch is asked for graphs that do not depend on the rank (``compile_on_one_rank``)."""
    return next((bool(c.compile_on_one_rank) for c in _CONFIGS if hasattr(c, "compile_on_one_rank")), False)


def saves_compiled_graph() -> bool:
    """Whether torch saves the graph being compiled by itself, to be loaded without this package's backend
    (``aot_compile``)."""
    return bool(functorch_config.bypass_autograd_cache_key and functorch_config.bundled_autograd_cache)


def allow_implicit_replication(allowed: bool) -> None:
    """Sets whether operators treat plain tensors as replicated DTensors."""
    torch._C._set_dtensor_allow_implicit_replication(allowed)


def implicit_replication_is_allowed() -> bool:
    """Whether operators currently treat plain tensors as replicated DTensors on this thread."""
    return torch._C._get_dtensor_allow_implicit_replication()


_still_allowed = fact_guard("IMPLICIT_REPLICATION", lambda read: read())


def guard_implicit_replication() -> None:
    """Guards the code that is being compiled on implicit replication, if that is allowed now."""
    if implicit_replication_is_allowed():
        _still_allowed(constant_source(InstructionTranslator.current_tx(), "setting", implicit_replication_is_allowed))


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """While active, operators treat plain tensors as replicated DTensors; restores the setting (torch's version
    disables it)."""
    before = implicit_replication_is_allowed()
    allow_implicit_replication(True)
    try:
        yield
    finally:
        allow_implicit_replication(before)


def start_loss_parallel() -> None:
    """Enables loss parallelism for losses over DTensors."""
    loss._enable_custom_loss_ops()


def end_loss_parallel() -> None:
    """Disables it again."""
    loss._disable_custom_loss_ops()


def _remember() -> Callable[[], None]:
    """Returns a function that restores the current settings."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    allowed, handled = implicit_replication_is_allowed(), dict(handlers)

    def restore() -> None:
        allow_implicit_replication(allowed)
        handlers.clear()
        handlers.update(handled)

    return restore


def _set(setter: Callable[..., None]) -> Call:
    """A handler that applies the setting during the trace, and adds a node that applies it when the graph is traced
    again."""
    has_side_effect(setter)

    def call(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        values = tuple(map(constant_argument, args))
        tx.output.add_cleanup_hook(_remember())  # tracing may end or start over before the program undoes it
        setter(*values)
        tx.output.create_proxy("call_function", setter, values, {})
        return build(tx, None)

    return call


def _read(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    return build(tx, stock.as_python_constant()())


def _nothing(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """Handles settings that do not affect the graph: names of collectives in a profile, works in flight outside."""
    return build(tx, None)


def _functions() -> Iterator[tuple[Any, Retrack]]:
    handlers: dict[tuple[Any, str], Call] = {
        (torch._C, "_set_dtensor_allow_implicit_replication"): _set(allow_implicit_replication),
        (torch._C, "_get_dtensor_allow_implicit_replication"): _read,
        (loss, "_enable_custom_loss_ops"): _set(start_loss_parallel),
        (loss, "_disable_custom_loss_ops"): _set(end_loss_parallel),
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
    """Restores the settings after a compilation, even if it fails."""
    restore = _remember()
    try:
        yield
    finally:
        restore()


#: Entries for `compat.dynamo.tracing.Entries`.
OBJECTS: tuple[tuple[Any, Retrack], ...] = tuple(_functions())
CONTEXTS = (_settings_as_before,)
