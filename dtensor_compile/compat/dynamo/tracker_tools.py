"""What trackers of ours are written with: graph breaks, sources, guards, members of objects."""

from __future__ import annotations

import functools
import inspect
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


#: What a tracker calls the slots that read an attribute and compare; every tracker of ours has both names of each.
READ = "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"


COMPARE = "tp_richcompare_impl" if hasattr(VariableTracker, "tp_richcompare_impl") else "richcompare_impl"


def read_attribute(owner: Any, tx: Translator, name: str) -> VariableTracker:
    """``owner.name`` of a tracker, or of the ``super()`` of one."""
    return getattr(owner, READ)(tx, name)


def real_object(value: Any) -> Any:
    """The object itself: while tracing it may be wrapped."""
    return object.__getattribute__(value, "real_obj") if isinstance(value, FakeScriptObject) else value


def describe_fake(value: Any) -> None:
    """``str`` of a wrapped object is that of the real one; Dynamo asks the wrapper, and would bake in the wrapper's
    address.
    """
    if isinstance(value, FakeScriptObject):
        real = real_object(value)
        object.__setattr__(value, "__str__", lambda: str(real))


def graph_break(code: str, context: str, explanation: str = "", hint: str = "") -> NoReturn:
    """An ordinary graph break: an error with ``fullgraph=True``, otherwise this piece of the program runs in eager.

    Args:
        code: the cause, as in `dtensor_compile.causes`.
        context: what was met.
        explanation, hint: why it is not traced, what the user can do; where not given, what the cause says in general.
    """
    row = cause(code)
    unimplemented(
        gb_type=break_title(code), context=context, explanation=explanation or row.why, hints=[hint or row.instead]
    )


def raise_in_program(tx: Translator, error: Exception) -> NoReturn:
    """The traced program meets `error` here, as it would in eager: it may catch it."""
    raise_observed_exception(type(error), tx, args=[str(arg) for arg in error.args])


def constant_argument(argument: VariableTracker) -> Any:
    """The value of an argument; a size that became symbolic is fixed to what it is, under a guard.

    Raises:
        NotImplementedError: the value is only known when the program runs.
    """
    if isinstance(argument, SymNodeVariable):
        return argument.evaluate_expr()
    return argument.as_python_constant()


def build(tx: Translator, value: Any) -> VariableTracker:
    """A tracker for a value that was computed while tracing."""
    return VariableTracker.build(tx, value)


def source_of(variable: VariableTracker) -> Source:
    """Where the program finds an object when it runs."""
    assert variable.source is not None
    return variable.source


def items_of(variable: VariableTracker) -> list[VariableTracker]:
    """The trackers of what is in a list or tuple."""
    return cast("BaseListVariable", variable.realize()).items


def function_variable(function: Callable[..., Any]) -> UserFunctionVariable:
    """The tracker of a function of ours that Dynamo traces."""
    return UserFunctionVariable(cast("types.FunctionType", function))


def member_function(
    owner: VariableTracker,
    name: str,
    call: Callable[[list[VariableTracker], dict[str, VariableTracker]], VariableTracker],
) -> VariableTracker:
    """The bound method `name` of `owner`, which calls `call` with the trackers of its arguments."""
    source = AttrSource(owner.source, name) if owner.source else None
    return LambdaVariable(lambda *args, **kwargs: call(list(args), kwargs), source=source)


def inline_member(owner: VariableTracker, tx: Translator, name: str) -> VariableTracker | None:
    """Member `name` of the object of `owner`, as of any Python object: data under guards, functions as code that is
    traced.

    None for what is neither data of the object itself nor Python code of its class.
    """
    real, source = owner.as_python_constant(), AttrSource(source_of(owner), name)
    found = inspect.getattr_static(type(real), name, None)
    if isinstance(found, types.FunctionType):
        if hasattr(found, STANDS_FOR):  # guards on it would look at what stands there now
            return UserMethodVariable(getattr(found, STANDS_FOR), owner)
        return UserMethodVariable(found, owner, source=source)
    if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
        return UserMethodVariable(found.fget, owner).call_function(tx, [], {})
    if name in getattr(real, "__dict__", ()):
        return build_member(owner, tx, name, vars(real)[name])
    return None


def build_member(owner: VariableTracker, tx: Translator, name: str, value: Any) -> VariableTracker:
    """Member `name` of the object of `owner` as data that is read there again when the program runs, under guards."""
    return VariableBuilder(tx, AttrSource(source_of(owner), name))(value)


def class_of(owner: VariableTracker, tx: Translator) -> VariableTracker:
    """The class of the object of `owner`."""
    return VariableBuilder(tx, TypeSource(source_of(owner)))(type(owner.as_python_constant()))


def constant_source(tx: Translator, kind: str, value: Any) -> Source:
    """A source for an object that tracing made or found: the compiled code keeps it, and can load it."""
    return GlobalSource(tx.output.install_global_by_id(f"__dtensor_compile_{kind}", value))


def tracked(tx: Translator, value: Any) -> VariableTracker | None:
    """The tracker that `value` already has in this frame, if any."""
    known = tx.output.side_effects  # no dict
    return known[value] if value in known else None  # noqa: SIM401


def remember(tx: Translator, value: Any, tracker: VariableTracker) -> VariableTracker:
    """Whoever meets `value` again in this frame, from whatever source, gets `tracker` (and a guard that it is the same
    one).
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
    """A tracker with a source whose object cannot change."""
    with _without_guards(tx.output.tracing_context.guards_context):
        return VariableBuilder(tx, source)(value)


def guard_sizes(source: Source, value: torch.Tensor) -> None:
    """Guards type, dtype and the sizes and strides that are constants of the graph; sizes that are symbolic stay free.

    torch guards a DTensor by its local tensor and its spec, and compares specs without their shapes.
    """
    if isinstance(source, GradSource) and is_from_optimizer_source(source):
        return  # as torch does: the shape of a gradient is that of its parameter
    install_guard(source.make_guard(functools.partial(GuardBuilder.TENSOR_MATCH, value=TensorWeakRef(value))))


def fact_guard(name: str, facts: Callable[[Any], Any]) -> Callable[[Source], None]:
    """A kind of guard: what ``facts(object)`` says is the same as while tracing. The result installs one on a
    source.
    """

    def create(builder: Any, guard: Guard) -> None:
        recorded = facts(real_object(builder.get(guard)))
        code = f"{name}({guard.name}) == {recorded!r}"
        builder.get_guard_manager(guard).add_lambda_guard(
            lambda value: facts(real_object(value)) == recorded, get_verbose_code_parts(code, guard), guard.user_stack
        )

    create.__name__ = name
    return lambda source: install_guard(source.make_guard(create))


__all__ = [
    "COMPARE", "READ", "Source", "Translator", "UserFunctionVariable", "VariableTracker", "build", "build_member",
    "build_unguarded", "class_of", "constant_argument", "constant_source", "describe_fake", "fact_guard",
    "function_variable", "graph_break", "guard_sizes", "inline_member", "items_of", "member_function",
    "raise_in_program", "read_attribute", "real_object", "remember", "source_of", "tracked",
]  # fmt: skip
