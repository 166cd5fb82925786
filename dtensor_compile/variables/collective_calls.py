"""Communicating functions of ``torch.distributed`` and methods of groups, traced as calls of their polyfills."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from dtensor_compile.causes import cause
from dtensor_compile.compat.distributed.functional_collectives import P2POpClassVariable, other_names, reduction_name
from dtensor_compile.compat.dynamo.trackers.calls import RefusingVariable
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    UserFunctionVariable,
    VariableTracker,
    build,
    function_variable,
    graph_break,
    raise_in_program,
)
from dtensor_compile.variables import work_handles
from dtensor_compile.variables.collectives import POLYFILLS, check_local_tensor
from dtensor_compile.variables.group_methods import METHODS


def refuse(name: str, code: str) -> NoReturn:
    """Breaks the graph at a call that is not traced."""
    graph_break(code, name, f"backend='dtensor' does not trace this call of {name}. {cause(code).why}")


class DistributedFunctionVariable(UserFunctionVariable):
    """A function of torch.distributed whose calls are traced as calls of its polyfill."""

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        function: Any = self.fn
        name = f"{function.__module__}.{function.__name__}"
        arguments = _bind(tx, name, self.fn, args, kwargs)
        if self.fn in (dist.recv, dist.irecv) and all(_is_none(arguments.get(name)) for name in ("src", "group_src")):
            refuse(name, "receive-from-any")
        return function_variable(POLYFILLS[self.fn]).call_function(tx, [], arguments)


def call_method_polyfill(
    tx: Translator,
    group: VariableTracker,
    name: str,
    args: Sequence[VariableTracker],
    kwargs: Mapping[str, VariableTracker],
) -> VariableTracker:
    """Calls the polyfill of method `name` of a process group; breaks the graph if C++ options are passed."""
    if any(isinstance(argument.realize(), RefusingVariable) for argument in (*args, *kwargs.values())):
        refuse(f"ProcessGroup.{name}", "raw-object")
    arguments = _bind(tx, f"ProcessGroup.{name}", METHODS[name], [group, *args], kwargs)
    return function_variable(METHODS[name]).call_function(tx, [], arguments)


def _bind(
    tx: Translator, name: str, function: Any, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
) -> dict[str, VariableTracker]:
    """Arguments by name, with reductions (C++ objects) replaced by their names, which polyfills take."""
    try:
        arguments = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise_in_program(tx, error)
    if "op" in arguments:
        reduction = reduction_name(getattr(arguments["op"], "value", None))
        if reduction is None:
            refuse(name, "reduction-not-plain")
        arguments["op"] = build(tx, reduction)
    return arguments


def checked_local_tensor(
    tx: Translator, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
) -> tuple[list[VariableTracker], dict[str, VariableTracker]]:
    """Arguments of ``DTensor.from_local(..., run_check=True)`` without ``run_check``, after `check_local_tensor` was
    traced.
    """
    named = dict(zip(("local_tensor", "device_mesh", "placements"), args)) | dict(kwargs)
    del named["run_check"]
    sizes_known = not _is_none(named.get("shape"))
    placements = named.get("placements", build(tx, None))
    check = function_variable(check_local_tensor)
    local = check.call_function(
        tx, [named["local_tensor"], named["device_mesh"], placements, build(tx, not sizes_known)], {}
    )
    return [], {**named, "local_tensor": local}


def _is_none(argument: VariableTracker | None) -> bool:
    return argument is None or argument.is_python_constant() and argument.as_python_constant() is None


def retrack(function: Any) -> Retrack:
    """Returns the factory of the tracker for a function that has a polyfill.

    Raises:
        KeyError: the function has no polyfill.
    """
    POLYFILLS[function]
    return lambda stock: DistributedFunctionVariable(function, source=stock.source)


#: Entries for `compat.dynamo.tracing.Entries.objects`.
OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    *((function, retrack(function)) for function in other_names("_all_gather_base", "_reduce_scatter_base")),
    *work_handles.OBJECTS,
    (dist.P2POp, lambda stock: P2POpClassVariable(dist.P2POp, source=stock.source)),
)
