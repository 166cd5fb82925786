"""Python calls that Dynamo defers until the graph has run, with the values that their arguments had at the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import dicts
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable, SizeVariable, TupleVariable
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.trackers.module_calls import happens_once
from dtensor_compile.compat.dynamo.trackers.opaque_trackers import MethodCall, OpaqueVariable, calls_of_methods
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, build_unguarded, constant_source
from dtensor_compile.compat.patches import needs, patch

#: Trackers of dicts: one for all classes before 2.14, one per class since.
_DICTS = (dicts.ConstDictVariable, getattr(dicts, "OrderedDictVariable", dicts.ConstDictVariable))


@dataclass(frozen=True)
class ArgumentPlace:
    """A line of the program: file, line, name of the function, and the namespace of its module."""

    filename: str
    line: int
    function: str
    namespace: dict[str, Any]


def place(tx: Translator, up: int = 0) -> ArgumentPlace:
    """The line that is being traced; with `up`, that of a caller, as far as callers are inlined."""
    while up > 0 and (caller := getattr(tx, "parent", None)) is not None:
        tx, up = caller, up - 1
    return ArgumentPlace(tx.f_code.co_filename, tx.lineno, tx.f_code.co_name, tx.f_globals)


def snapshot(tx: Translator, variable: VariableTracker) -> VariableTracker:
    """A tracker of the current value of `variable`, which Python can reconstruct when the graph has run.

    Raises:
        NotImplementedError: it is not a tensor, a constant, a mesh, a group, a placement or a container of those; or it
            is inside a subgraph (activation checkpointing), whose tensors cannot leave it.
    """
    variable = variable.realize()
    if isinstance(variable, TensorVariable):
        if tx.output.current_tracer.parent is not None:
            raise NotImplementedError("a tensor of an inner region")
        return variable.call_method(tx, "detach", [], {}).call_method(tx, "clone", [], {})
    if isinstance(variable, StringFormatVariable):
        args = [snapshot(tx, arg) for arg in variable.sym_args]
        return StringFormatVariable(
            variable.format_string, args, {k: snapshot(tx, v) for k, v in variable.sym_kwargs.items()}
        )
    if isinstance(variable, ConstantVariable) or (isinstance(variable, OpaqueVariable) and variable.source is not None):
        return variable
    if isinstance(variable, SymNodeVariable) and tx.output.current_tracer.parent is None:
        return variable
    if type(variable) is ListVariable:
        return ListVariable([snapshot(tx, item) for item in variable.items], mutation_type=ValueMutationNew())
    if isinstance(variable, TupleVariable) and type(variable) in (TupleVariable, SizeVariable):
        return type(variable)([snapshot(tx, item) for item in variable.items])
    if type(variable) in _DICTS:
        table: Any = variable  # its class depends on the release
        items = {key.vt: snapshot(tx, value) for key, value in table.items.items()}
        of = {"user_cls": table.user_cls} if hasattr(table, "user_cls") else {}
        return type(table)(items, **of, mutation_type=ValueMutationNew())
    if variable.is_python_constant():
        return variable
    raise NotImplementedError(str(variable))


def call_after_graph(
    tx: Translator, function: Callable[..., Any], args: Sequence[VariableTracker]
) -> list[VariableTracker]:
    """Calls ``function(*args)`` when the graph has run, after the calls that were deferred before.

    Args:
        args: snapshots.

    Returns:
        The arguments of the call; they may be replaced while the frame is traced.
    """

    happens_once(tx, "it calls Python when the graph has run")

    @torch.compiler.disable
    def call(*values: Any) -> None:  # left to Python: Dynamo would defer the calls in it, too
        function(*values)

    source = constant_source(tx, "call", call)
    arguments = list(args)
    tx.output.root_tx.debug_locals.append((build_unguarded(tx, call, source), arguments))
    return arguments


def is_export(tx: Translator) -> bool:
    """Whether the frame is traced for ``torch.export``, which keeps only its graph."""
    return bool(tx.export)


_LOGGER = patch("torch._dynamo.variables.misc:LoggingLoggerVariable.call_method", "self tx name args kwargs")
_FORMAT = patch(
    "torch._dynamo.variables.misc:StringFormatVariable.create",
    "cls format_string sym_args sym_kwargs",
    "cls tx format_string sym_args sym_kwargs",  # as of 2.15
)


@needs(
    "loggers in the region",
    _LOGGER,
    without="they break the graph, as in torch",
    upstream="#132635, #190840",
    remove_when="reorderable_logging_functions takes methods of loggers and keeps the values of the call",
)
@contextlib.contextmanager
def handle_loggers(call: MethodCall) -> Iterator[None]:
    """While active, calls of logger methods go to `call`."""
    with calls_of_methods(_LOGGER, call):
        yield


@needs(
    "formatted values that change later",
    _FORMAT,
    without="texts can have later values, as in torch",
    upstream="#182638, #186500",
    remove_when="a string in which a tensor is formatted keeps the values of that moment",
)
@contextlib.contextmanager
def format_values_of_now() -> Iterator[None]:
    """While active, a string in which a tensor is formatted has the values of the tensor at that moment."""

    def create(stock: Any, *args: Any) -> VariableTracker:
        made = stock(*args)
        tx = InstructionTranslator.current_tx()
        return snapshot_or_same(tx, made) if isinstance(made, StringFormatVariable) else made

    with patched(_FORMAT, create):
        yield


def snapshot_or_same(tx: Translator, variable: VariableTracker) -> VariableTracker:
    """`snapshot`, or `variable` itself if that is not supported."""
    try:
        return snapshot(tx, variable)
    except NotImplementedError:
        return variable
