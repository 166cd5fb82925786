"""Python stand-ins for pybind objects (Work, Future) while tracing.

A class of ours extends a C++ class of torch's and implements in Python the methods that the program may call. While
tracing, an object consists only of the fields of the class. To the program it is of the C++ class. An object that
leaves the graph is constructed then.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable

from dtensor_compile.compat.dynamo.left_to_python import leave_to_python
from dtensor_compile.compat.dynamo.trackers.calls import handle_calls
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    bound_method,
    build,
    graph_break,
    member_function,
    raise_in_program,
)
from dtensor_compile.compat.patches import if_there

#: torch's comparison of objects without their own. (On 2.11, ``==`` calls the method.)
_object_richcompare = if_there("torch._dynamo.variables.object_protocol:object_richcompare")


class StandInVariable(VariableTracker):
    """An object of `cls`, whose ``__init__`` has one parameter for each of its ``FIELDS``.

    `refused` maps members that are not traced to causes.
    """

    _nonvar_fields = {"cls", "refused", *VariableTracker._nonvar_fields}

    def __init__(
        self, cls: type, refused: Mapping[str, str], fields: Mapping[str, VariableTracker], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.cls, self.refused, self.fields = cls, refused, dict(fields)

    def python_type(self) -> type:
        return self.cls.__mro__[1]

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        if name in self.fields:
            return self.fields[name]
        found = inspect.getattr_static(self.cls, name, None)
        if isinstance(found, types.FunctionType):
            return bound_method(found, self)
        if name == "__class__":
            return build(tx, self.python_type())
        if name in self.refused:
            text = f"{self.python_type().__name__}.{name}"
            if isinstance(inspect.getattr_static(self.python_type(), name, None), property):
                graph_break(self.refused[name], text)
            return member_function(self, name, lambda args, kwargs: graph_break(self.refused[name], text))
        base = self.python_type()
        raise_in_program(tx, AttributeError(f"'{base.__module__}.{base.__name__}' object has no attribute '{name}'"))

    def call_method(
        self, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        if name in ("__eq__", "__ne__") and _object_richcompare is None:
            return build(tx, (args[0].realize() is self) is (name == "__eq__"))
        return self.var_getattr(tx, name).call_function(tx, list(args), dict(kwargs))

    def call_obj_hasattr(self, tx: Translator, name: str) -> ConstantVariable:
        return ConstantVariable.create(hasattr(self.python_type(), name))

    def richcompare_impl(self, tx: Translator, other: VariableTracker, op: str) -> VariableTracker:
        return _object_richcompare(self, tx, other, op)

    tp_richcompare_impl = richcompare_impl  # since 2.14

    def hash_impl(self, tx: Translator) -> tuple[int, bool]:
        return hash(id(self)), True

    def reconstruct(self, codegen: Any) -> None:
        codegen.add_push_null(lambda: codegen.load_import_from(self.cls.__module__, self.cls.__name__))
        codegen.foreach(self.fields.values())
        codegen.extend_output(create_call_function(len(self.fields), False))

    tp_getattro_impl = var_getattr  # since 2.14


#: The class of the futures of works.
CFuture = torch.futures.Future.__mro__[1]


def stand_in(cls: Any, refused: Mapping[str, str]) -> tuple[Any, Retrack]:
    """The entry for `compat.dynamo.tracing.Entries.objects` by which calls of `cls` make stand-ins."""

    leave_to_python(cls)

    def make(
        tx: Translator, stock: VariableTracker, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        given = inspect.signature(cls.__init__).bind(None, *args, **kwargs)
        given.apply_defaults()
        values = list(given.arguments.values())[1:]
        fields = {
            name: value if isinstance(value, VariableTracker) else build(tx, value)
            for name, value in zip(cls.FIELDS, values)
        }
        return StandInVariable(cls, refused, fields)

    return cls, handle_calls(make)
