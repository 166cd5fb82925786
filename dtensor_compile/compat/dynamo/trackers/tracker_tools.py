"""Helpers for trackers: graph breaks, sources, guards, members of objects."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch._dynamo.exc import raise_observed_exception, unimplemented
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.source import AttrSource, GlobalSource, GradSource, TypeSource, is_from_optimizer_source
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.misc import LambdaVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._guards import Guard, GuardsContext, GuardsSet, Source
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils.weak import TensorWeakRef

from dtensor_compile.causes import break_title, cause
from dtensor_compile.compat.apply_patches import (
    STANDS_FOR,
)

if TYPE_CHECKING:
    from torch._dynamo.variables.lists import BaseListVariable

Translator = InstructionTranslatorBase


#: Names of a tracker's slots for attribute access and comparison; our trackers define both names of each.
READ = "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"


COMPARE = "tp_richcompare_impl" if hasattr(VariableTracker, "tp_richcompare_impl") else "richcompare_impl"


def read_attribute(owner: Any, tx: Translator, name: str) -> VariableTracker:
    """``owner.name`` of a tracker, or of the ``super()`` of one."""
    return getattr(owner, READ)(tx, name)


def real_object(value: Any) -> Any:
    """The object itself, unwrapped; while tracing it may be a ``FakeScriptObject``."""
    return object.__getattribute__(value, "real_obj") if isinstance(value, FakeScriptObject) else value


def describe_fake(value: Any) -> None:
    """Makes ``str`` of a wrapped object that of the real one; Dynamo would bake the wrapper's address into the
    graph."""
    if isinstance(value, FakeScriptObject):
        real = real_object(value)
        object.__setattr__(value, "__str__", lambda: str(real))


def graph_break(code: str, context: str, explanation: str = "", hint: str = "") -> NoReturn:
    """Breaks the graph: an error with ``fullgraph=True``, otherwise this part of the program runs in eager.

    Args:
        code: the cause, as in `dtensor_compile.causes`.
        context: the construct that was found.
        explanation, hint: the reason why it is not traced, and the remedy; by default, the cause's texts.
    """
    row = cause(code)
    unimplemented(
        gb_type=break_title(code), context=context, explanation=explanation or row.why, hints=[hint or row.instead]
    )


def raise_in_program(tx: Translator, error: Exception) -> NoReturn:
    """Raises `error` inside the traced program, which may catch it as in eager."""
    raise_observed_exception(type(error), tx, args=[str(arg) for arg in error.args])


def constant_argument(argument: VariableTracker) -> Any:
    """The value of an argument; a symbolic size is specialized, under a guard.

    Raises:
        NotImplementedError: the value is only known at run time.
    """
    if isinstance(argument, SymNodeVariable):
        return argument.evaluate_expr()
    return argument.as_python_constant()


def build(tx: Translator, value: Any) -> VariableTracker:
    """A tracker for a value that was computed while tracing."""
    return VariableTracker.build(tx, value)


def source_of(variable: VariableTracker) -> Source:
    """The source of a tracker that has one."""
    assert variable.source is not None
    return variable.source


def items_of(variable: VariableTracker) -> list[VariableTracker]:
    """The trackers of the items of a list or tuple."""
    return cast("BaseListVariable", variable.realize()).items


def function_variable(function: Callable[..., Any]) -> UserFunctionVariable:
    """The tracker of a function of ours that Dynamo traces."""
    return UserFunctionVariable(cast("types.FunctionType", function))


#: Whether the tracker of a bound method holds one of its function, as of 2.15; before, it is one itself.
_HOLDS_FUNCTION = "im_func" in inspect.signature(UserMethodVariable.__init__).parameters


def bound_method(
    function: Callable[..., Any], owner: VariableTracker, source: Source | None = None
) -> UserMethodVariable:
    """The tracker of `function` as a method of `owner`.

    Args:
        source: of the bound method; None if guards need not check it.
    """
    if not _HOLDS_FUNCTION:
        return UserMethodVariable(function, owner, source=source)
    of_function = AttrSource(source, "__func__") if source is not None else None
    traced = UserFunctionVariable(cast("types.FunctionType", function), source=of_function)
    return UserMethodVariable(cast("Any", traced), owner, source=source)


def member_function(
    owner: VariableTracker,
    name: str,
    call: Callable[[list[VariableTracker], dict[str, VariableTracker]], VariableTracker],
) -> VariableTracker:
    """The bound method `name` of `owner`, which calls `call` with the trackers of its arguments."""
    source = AttrSource(owner.source, name) if owner.source else None
    return LambdaVariable(lambda *args, **kwargs: call(list(args), kwargs), source=source)


def inline_member(owner: VariableTracker, tx: Translator, name: str) -> VariableTracker | None:
    """Member `name` of the object of `owner`, as for any Python object: data under guards, functions traced as code.

    None if it is neither data of the object itself nor Python code of its class.
    """
    real, source = owner.as_python_constant(), AttrSource(source_of(owner), name)
    found = inspect.getattr_static(type(real), name, None)
    if isinstance(found, types.FunctionType):
        if hasattr(found, STANDS_FOR):  # guards would check the current replacement
            return bound_method(getattr(found, STANDS_FOR), owner)
        return bound_method(found, owner, source)
    if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
        return bound_method(found.fget, owner).call_function(tx, [], {})
    if name in getattr(real, "__dict__", ()):
        return build_member(owner, tx, name, vars(real)[name])
    return None


def build_member(owner: VariableTracker, tx: Translator, name: str, value: Any) -> VariableTracker:
    """Member `name` of the object of `owner` as data that is read again at run time, under guards."""
    return VariableBuilder(tx, AttrSource(source_of(owner), name))(value)


def class_of(owner: VariableTracker, tx: Translator) -> VariableTracker:
    """The class of the object of `owner`."""
    return VariableBuilder(tx, TypeSource(source_of(owner)))(type(owner.as_python_constant()))


#: Prefix of the names of globals for objects of tracing; kind and address follow.
_CONSTANT = "__dtensor_compile_"
_NAMED = re.compile(r"(?:G_|__)dtensor_compile_([a-z_]+)_[0-9]+_c.*")


def constant_source(tx: Translator, kind: str, value: Any) -> Source:
    """A source for an object that tracing made or found, kept by the compiled code."""
    return GlobalSource(tx.output.install_global_by_id(f"{_CONSTANT}{kind}", value))


def kind_of_constant(name: str) -> str | None:
    """The kind of object whose global, or input of a graph, has this name; None for other names."""
    found = _NAMED.fullmatch(name)
    return found[1] if found else None


def tracked(tx: Translator, value: Any) -> VariableTracker | None:
    """The tracker that `value` already has in this frame, if any."""
    known = tx.output.side_effects  # not a dict
    return known[value] if value in known else None  # noqa: SIM401


def remember(tx: Translator, value: Any, tracker: VariableTracker) -> VariableTracker:
    """Makes later lookups of `value` in this frame, from any source, return `tracker`, with a guard on identity.

    A mesh has a guard on equality instead (`mesh_guards`).
    """
    if value in tx.output.side_effects:
        return tracker
    return tx.output.side_effects.track_object_existing(value, tracker)


@contextmanager
def _without_guards(context: GuardsContext) -> Iterator[None]:
    """While active, no guards are installed."""
    if hasattr(context, "skip_guard_install"):
        with context.skip_guard_install():
            yield
        return
    installed, context.dynamo_guards = context.dynamo_guards, GuardsSet()  # before 2.13
    try:
        yield
    finally:
        context.dynamo_guards = installed


def build_unguarded(tx: Translator, value: Any, source: Source) -> VariableTracker:
    """A tracker with a source, for an object that cannot change."""
    with _without_guards(tx.output.tracing_context.guards_context):
        return VariableBuilder(tx, source)(value)


def guard_sizes(source: Source, value: torch.Tensor) -> None:
    """Guards type, dtype, and static sizes and strides; symbolic sizes are not guarded.

    torch guards a DTensor by its local tensor and its spec, and compares specs without shapes.
    """
    if isinstance(source, GradSource) and is_from_optimizer_source(source):
        return  # as torch does: the shape of a gradient is that of its parameter
    install_guard(source.make_guard(functools.partial(GuardBuilder.TENSOR_MATCH, value=TensorWeakRef(value))))


def fact_guard(name: str, facts: Callable[[Any], Any]) -> Callable[[Source], None]:
    """Creates a kind of guard: ``facts(object)`` equals its value during the trace. The result installs one on a
    source."""

    def create(builder: Any, guard: Guard) -> None:
        recorded = facts(real_object(builder.get(guard)))
        code = f"{name}({guard.name}) == {recorded!r}"
        builder.get_guard_manager(guard).add_lambda_guard(
            lambda value: facts(real_object(value)) == recorded, get_verbose_code_parts(code, guard), guard.user_stack
        )

    create.__name__ = name
    create.facts = lambda value: facts(real_object(value))  # type: ignore[attr-defined]
    return lambda source: install_guard(source.make_guard(create))


__all__ = [
    "COMPARE", "READ", "Source", "Translator", "UserFunctionVariable", "VariableTracker", "build", "build_member",
    "build_unguarded", "class_of", "constant_argument", "constant_source", "describe_fake", "fact_guard",
    "function_variable", "graph_break", "guard_sizes", "inline_member", "items_of", "member_function",
    "raise_in_program", "read_attribute", "real_object", "remember", "source_of", "tracked",
]  # fmt: skip
