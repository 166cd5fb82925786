"""``print``, ``warnings`` and ``logging``: run by Python after the graph, in the order of the program.

The arguments have their values at the call: tensors are copied there (without autograd history, so that ``grad_fn`` of
a plain tensor is not printed); meshes, groups and placements do not change. Log records and warnings name the line of
the program, as in eager.
"""

from __future__ import annotations

import builtins
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from dtensor_compile.compat.dynamo.trackers.after_graph import (
    ArgumentPlace,
    call_after_graph,
    format_values_of_now,
    handle_loggers,
    is_export,
    place,
    snapshot,
)
from dtensor_compile.compat.dynamo.trackers.calls import handle_calls, is_ignored
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    VariableTracker,
    build,
    constant_argument,
    fact_guard,
    graph_break,
    source_of,
)

Arguments = tuple[list[VariableTracker], dict[str, VariableTracker]]


@dataclass(frozen=True, eq=False)
class DeferredCall:
    """A call with positional and keyword arguments, as a function of positional arguments only.

    Attributes:
        function: called as ``function(place, *args, **kwargs)``.
        place: the line of the program.
        names: names of the last arguments.
    """

    function: Callable[..., None]
    place: ArgumentPlace
    names: tuple[str, ...]

    def __call__(self, *values: Any) -> None:
        count = len(values) - len(self.names)
        self.function(self.place, *values[:count], **dict(zip(self.names, values[count:])))


def _call_after_graph(
    tx: Translator, what: str, function: Callable[..., None], arguments: Arguments, up: int = 0
) -> VariableTracker:
    """Calls ``function(place, *args, **kwargs)`` after the graph has run. (``file=`` of ``print`` is looked up
    then.)
    """
    args, kwargs = arguments
    if is_export(tx):
        return build(tx, None)
    try:
        values = [snapshot(tx, arg) for arg in args]
        values += [arg if name == "file" and arg.source else snapshot(tx, arg) for name, arg in kwargs.items()]
    except NotImplementedError:
        graph_break(
            "message-argument",
            f"{what}({', '.join(map(str, [*args, *kwargs.values()]))})",
            f"backend='dtensor' calls {what} after the graph has run, and can defer tensors, constants, meshes, "
            "groups, placements, and lists of those, outside of checkpointed regions.",
        )
    call_after_graph(tx, DeferredCall(function, place(tx, up), tuple(kwargs)), values)
    return build(tx, None)


# ---- what Python calls when the graph has run ----------------------------------------------------------------------


def _print(_: ArgumentPlace, *args: Any, **kwargs: Any) -> None:
    print(*args, **kwargs)


def _warn(at: ArgumentPlace, message: Any, category: type[Warning] | None = None, source: Any = None) -> None:
    if isinstance(message, Warning):
        category = type(message)
    registry = at.namespace.setdefault("__warningregistry__", {})
    module = at.namespace.get("__name__") or "<string>"
    warnings.warn_explicit(
        message, category or UserWarning, at.filename, at.line, module, registry, at.namespace, source
    )


def _log(at: ArgumentPlace, logger: logging.Logger, level: int, message: Any, *args: Any, extra: Any = None) -> None:
    if logger.isEnabledFor(level):
        logger.handle(
            logger.makeRecord(logger.name, level, at.filename, at.line, message, args, None, at.function, extra)
        )


def _log_to_root(at: ArgumentPlace, level: int, message: Any, *args: Any, extra: Any = None) -> None:
    if not logging.root.handlers:
        logging.basicConfig()
    _log(at, logging.root, level, message, *args, extra=extra)


# ---- the calls of the program --------------------------------------------------------------------------------------


def _handle_print(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    return _call_after_graph(tx, "print", _print, (args, kwargs))


def _handle_warn(
    tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    if is_ignored(stock):
        return stock.call_function(tx, args, kwargs)
    named = dict(zip(("message", "category", "stacklevel", "source"), args)) | kwargs
    if not named.keys() <= {"message", "category", "stacklevel", "source"} or "message" not in named:
        return stock.call_function(tx, args, kwargs)
    level = constant_argument(named.pop("stacklevel")) if "stacklevel" in named else 1
    return _call_after_graph(tx, "warnings.warn", _warn, ([named.pop("message")], named), up=level - 1)


#: Methods of loggers and functions of ``logging``, with their level; the level of ``log`` is its first argument.
_LEVELS: Mapping[str, int | None] = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "warn": logging.WARNING,
    "error": logging.ERROR, "critical": logging.CRITICAL, "fatal": logging.CRITICAL, "log": None,
}  # fmt: skip


def _levelled(tx: Translator, name: str, args: Sequence[VariableTracker]) -> list[VariableTracker]:
    """The arguments, with the level first."""
    level = _LEVELS[name]
    return list(args) if level is None else [build(tx, level), *args]


def _logger(variable: Any) -> logging.Logger:
    return variable.value


def _handle_logger(
    tx: Translator, logger: VariableTracker, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker | None:
    real = _logger(logger)
    if name in _QUESTIONS and not kwargs and logger.source is not None:
        return _answer(tx, logger, name, args)
    if name not in _LEVELS or not kwargs.keys() <= {"extra", "stacklevel"} or is_ignored(getattr(real, name)):
        return None
    if getattr(type(real), name) is not getattr(logging.Logger, name):
        return None  # a user-defined subclass that overrides the method
    up = constant_argument(kwargs.pop("stacklevel")) - 1 if "stacklevel" in kwargs else 0
    function = _LogTo(real)
    return _call_after_graph(tx, f"{real.name}.{name}", function, (_levelled(tx, name, args), kwargs), up)


@dataclass(frozen=True, eq=False)
class _LogTo:
    """`_log` bound to one logger."""

    logger: logging.Logger

    def __call__(self, at: ArgumentPlace, *args: Any, **kwargs: Any) -> None:
        _log(at, self.logger, *args, **kwargs)


#: Methods of loggers that the program may branch on: constants, under a guard.
_QUESTIONS = frozenset({"isEnabledFor", "getEffectiveLevel", "hasHandlers"})


def _answer(tx: Translator, logger: VariableTracker, name: str, args: Sequence[VariableTracker]) -> VariableTracker:
    real_args = [constant_argument(arg) for arg in args]

    def ask(real: logging.Logger) -> Any:
        return getattr(real, name)(*real_args)

    fact_guard("LOGGER_MATCH", ask)(source_of(logger))
    return build(tx, ask(_logger(logger)))


def _handle_log_function(name: str) -> Retrack:
    def call(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if is_ignored(stock) or not kwargs.keys() <= {"extra"}:
            return stock.call_function(tx, args, kwargs)
        return _call_after_graph(tx, f"logging.{name}", _log_to_root, (_levelled(tx, name, args), kwargs))

    return handle_calls(call)


#: Functions whose calls are handled here.
OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    (builtins.print, handle_calls(_handle_print)),
    (warnings.warn, handle_calls(_handle_warn)),
    *((getattr(logging, name), _handle_log_function(name)) for name in _LEVELS if name not in ("warn", "fatal")),
)


def _loggers() -> AbstractContextManager[None]:
    return handle_loggers(_handle_logger)


#: Contexts that are entered while Dynamo traces.
CONTEXTS: tuple[Callable[[], AbstractContextManager[None]], ...] = (_loggers, format_values_of_now)
