"""Trackers of opaque objects (meshes, groups, placements) under names that work on all releases, and methods of
tensors."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch._dynamo.variables import script_object
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

from dtensor_compile.compat.apply_patches import on_this_thread, patched, patched_entries
from dtensor_compile.compat.dynamo.trackers.constant_objects import (
    OPAQUE,
    STOCK_CLASSES,
    ConstantClassVariable,
    ConstantObjectVariable,
)
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator
from dtensor_compile.compat.patches import Patch, patch


def _named(module: types.ModuleType, *names: str) -> Any:
    """The first of `names` that the module has; the name differs between releases."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


_TENSOR = "torch._dynamo.variables.tensor:TensorVariable"
#: Calls of tensor methods while a program is traced; patched by several features.
CALL_METHOD = patch(f"{_TENSOR}.call_method", "self tx name args kwargs")
#: The table of tensor methods (since 2.14).
METHODS = patch(f"{_TENSOR}.tp_methods", optional=True)


@contextmanager
def tensor_methods(**handlers: Callable[..., VariableTracker | None]) -> Iterator[None]:
    """While active, calls of these tensor methods go to ``handler(stock, self, tx, ...)``."""
    table = getattr(TensorVariable, "tp_methods", {})  # since 2.14 it holds the functions themselves
    with ExitStack() as stack:
        for name, handler in handlers.items():
            stack.enter_context(patched(patch(f"{_TENSOR}.method_{name}"), handler))
            if name in table:
                entry = dataclasses.replace(table[name], handler=on_this_thread(table[name].handler, handler))
                stack.enter_context(patched_entries(METHODS, {name: entry}, table))
        yield


#: ``(tx, object, method, args, kwargs)``; None leaves the call to torch.
MethodCall = Callable[[Translator, Any, str, list[VariableTracker], dict[str, VariableTracker]], VariableTracker | None]


def calls_of_methods(row: Patch, call: MethodCall) -> AbstractContextManager[None]:
    """While active, method calls on trackers of a class go to `call`.

    Args:
        row: ``call_method`` of the class of trackers.
    """

    def call_method(
        stock: Any, self: Any, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, Any]
    ) -> VariableTracker:
        result = call(tx, self, name, list(args), dict(kwargs))
        return stock(self, tx, name, args, kwargs) if result is None else result

    return patched(row, call_method)


#: Tracks an opaque object: mesh, group or placement.
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
    """Whether `variable` is torch's tracker of the class of such objects."""
    return isinstance(variable, OpaqueClassVariable if OPAQUE else STOCK_CLASSES)


class MemberVariable(OpaqueVariable):
    """Tracks an opaque object, with Dynamo's queries under names that work on all releases."""

    if TYPE_CHECKING:

        def as_python_constant(self) -> Any: ...

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

    tp_getattro_impl, tp_repr_impl, tp_str_impl = var_getattr, repr_impl, str_impl  # since 2.14
