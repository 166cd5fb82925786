"""Trackers of opaque objects (meshes, groups, placements) under names of all releases, and methods of tensors."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._dynamo.variables import script_object
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

from dtensor_compile.compat.apply_patches import (
    on_this_thread,
    patched_entries,
    patched_value,
)
from dtensor_compile.compat.dynamo.constant_objects import (
    OPAQUE,
    STOCK_CLASSES,
    ConstantClassVariable,
    ConstantObjectVariable,
)
from dtensor_compile.compat.dynamo.tracker_tools import Translator
from dtensor_compile.compat.patches import patch


def _named(module: types.ModuleType, *names: str) -> Any:
    """The first of `names` that the module has: releases call the same thing by different names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


#: Methods of tensors that are called while a program is traced; several features replace it.
CALL_METHOD = patch("torch._dynamo.variables.tensor:TensorVariable.call_method", "self tx name args kwargs")


_METHODS = patch("torch._dynamo.variables.tensor:TensorVariable.tp_methods", optional=True)


@contextmanager
def tensor_methods(**handlers: Callable[..., VariableTracker | None]) -> Iterator[None]:
    """While it is entered, calls of these methods of tensors go to these functions in place of
    ``TensorVariable.method_...``.
    """
    table = getattr(TensorVariable, "tp_methods", {})  # as of 2.14 it holds the functions themselves
    with ExitStack() as stack:
        for name, handler in handlers.items():
            row = patch(f"torch._dynamo.variables.tensor:TensorVariable.method_{name}")
            ours = on_this_thread(
                getattr(TensorVariable, f"method_{name}"), lambda _, *args, _h=handler, **k: _h(*args, **k)
            )
            stack.enter_context(patched_value(row, ours))
            if name in table:
                stack.enter_context(
                    patched_entries(_METHODS, {name: dataclasses.replace(table[name], handler=ours)}, table)
                )
        yield


#: Tracks an object that tensors and operators carry around without looking inside: meshes, groups, placements.
OpaqueVariable: Any = (
    _named(script_object, "TorchScriptObjectVariable", "CustomClassObjectVariable")
    if OPAQUE
    else ConstantObjectVariable
)


#: Tracks the class of such objects.
OpaqueClassVariable: Any = (
    _named(script_object, "OpaqueObjectClassVariable", "CustomClassVariable") if OPAQUE else ConstantClassVariable
)


def is_opaque_class(variable: VariableTracker) -> bool:
    """Whether `variable` is what torch tracks the class of such objects by."""
    return isinstance(variable, OpaqueClassVariable if OPAQUE else STOCK_CLASSES)


class MemberVariable(OpaqueVariable):
    """Tracks an opaque object: what Dynamo asks of it, under names that stay the same from release to release."""

    def read_member(self, tx: Translator, name: str) -> VariableTracker:
        """``object.name``"""
        raise NotImplementedError

    def text(self, tx: Translator, method: str) -> VariableTracker:
        """``repr(object)`` or ``str(object)``: `method` is ``"__repr__"`` or ``"__str__"``."""
        raise NotImplementedError

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        return self.read_member(tx, name)

    def repr_impl(self, tx: Translator) -> VariableTracker:
        return self.text(tx, "__repr__")

    def str_impl(self, tx: Translator) -> VariableTracker:
        return self.text(tx, "__str__")

    tp_getattro_impl, tp_repr_impl, tp_str_impl = var_getattr, repr_impl, str_impl  # as of 2.14
