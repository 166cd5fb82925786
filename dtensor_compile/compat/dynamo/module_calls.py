"""Dynamo: calls of certain functions and methods, and the parameters that a module has while it is being traced.

Built on ``compat/dynamo/tracing.py``; in place only while Dynamo traces for our backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch._dynamo.source import AttrSource, GetItemSource
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.user_defined import UserDefinedDictVariable
from torch._guards import GuardSource

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.calls import Call, attribute
from dtensor_compile.compat.dynamo.tracker_tools import Translator, source_of
from dtensor_compile.compat.patches import hook, if_there, needs, patch

if TYPE_CHECKING:
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

_Dict: Any = ConstDictVariable  # up to 2.12 the class below is a member of it
#: A tracker as a key of a dict.
_HashableTracker: Any = if_there("torch._dynamo.variables.hashable:HashableTracker") or _Dict._HashableTracker
#: What a call of a Python function becomes, or None for one that is traced as usual.
FindCall = Callable[[UserFunctionVariable], "Call | None"]


_CALL = patch("torch._dynamo.variables.functions:UserFunctionVariable.call_function", "self tx args kwargs")
_IS_OF_MODULE = patch("torch._guards:GuardSource.is_unspecialized_nn_module", "self")


@needs(
    "functions of torch's with traced forms of ours",
    _CALL,
    without="some programs break the graph",
    upstream="not reported: an extension point, substitute_in_graph is for all backends at once",
    remove_when="torch.compiler.substitute_in_graph can be limited to a backend, and takes methods",
)
@contextlib.contextmanager
def handle_functions(find: FindCall) -> Iterator[None]:
    """While active, calls of Python functions and methods in frames for our backend go to what `find` says.

    The arguments of a method begin with its object.
    """

    def call_function(
        stock: Any,
        self: UserFunctionVariable,
        tx: Translator,
        args: list[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> VariableTracker:
        call = find(self)
        if call is None:
            return stock(self, tx, args, kwargs)
        return call(tx, self, [*self.self_args(), *args], dict(kwargs))

    with patched(_CALL, call_function):
        yield


@needs(
    "attributes of sharded modules",
    hook("torch._guards:GuardSource.is_fsdp_module", "self"),
    _IS_OF_MODULE,
    without="numbers and buffers of modules under fully_shard have symbolic sizes with dynamic=True, which takes long "
    "to compile",
    upstream="#194795",
    remove_when="#194795 is in every supported release, and holds for buffers",
)
@contextlib.contextmanager
def attributes_are_static() -> Iterator[None]:
    """While active, ints and buffers of modules under ``fully_shard`` are static in frames for our backend.

    Dynamo takes the ints of every module for constants, and the sizes of its buffers, whatever ``dynamic`` says; those
    of a module that is marked as sharded it forgets. A head size that is a symbol makes quotients of all sizes that
    depend on it."""

    def is_of_module(stock: Any, self: GuardSource) -> bool:
        return stock(self) or self.is_fsdp_module()

    with patched(_IS_OF_MODULE, is_of_module):
        yield


def member(tx: Translator, owner: VariableTracker, path: Sequence[str | int]) -> VariableTracker:
    """What is found from an object along a path of attributes and indices of lists, as an input of the graph."""
    source, value = source_of(owner), real_value(tx, owner)
    for part in path:
        source = AttrSource(source, part) if isinstance(part, str) else GetItemSource(source, part)
        value = getattr(value, part) if isinstance(part, str) else value[part]
    return VariableTracker.build(tx, value, source)


def real_value(tx: Translator, variable: VariableTracker) -> Any:
    """The object itself, of a tracker with a source."""
    source = source_of(variable)
    if hasattr(tx.output, "resolve_source_value"):
        return tx.output.resolve_source_value(source)
    return source.get_value({"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}, {}, {})  # before 2.13


def function_of(variable: UserFunctionVariable) -> Any:
    """The function that is called, without its object."""
    return variable.fn


def tuple_of(*items: VariableTracker) -> VariableTracker:
    """``(*items)``"""
    return TupleVariable(list(items))


def dict_of(items: Mapping[str, VariableTracker]) -> VariableTracker:
    """``{**items}``"""
    keyed = {ConstantVariable.create(key): value for key, value in items.items()}
    return ConstDictVariable(keyed, mutation_type=ValueMutationNew())


def submodule(tx: Translator, module: VariableTracker, path: str) -> VariableTracker:
    """The tracker of ``module.get_submodule(path)``."""
    for name in path.split(".") if path else ():
        module = attribute(tx, module, name).realize()
    return module


# ---- parameters in place of others ---------------------------------------------------------------------------------


def notes(tx: Translator, name: str) -> dict[Any, Any]:
    """What was noted under `name` in this attempt to trace this frame."""
    return vars(tx.output).setdefault(f"dtensor_compile_{name}", {})


def _parameters(tx: Translator, module: VariableTracker) -> dict[Any, VariableTracker]:
    found = attribute(tx, module, "_parameters").realize()
    variable = found._base_vt if isinstance(found, UserDefinedDictVariable) else found
    assert isinstance(variable, ConstDictVariable)
    return variable.items


def _key(name: str) -> Any:
    return _HashableTracker(ConstantVariable.create(name))


def _before(tx: Translator, module: VariableTracker, name: str) -> list[VariableTracker]:
    """What the parameter was before each replacement that is in force, the last one last."""
    of = cast("UserDefinedObjectVariable", module.realize()).value
    return notes(tx, "replaced").setdefault((id(of), name), [])


def replace_parameter(
    tx: Translator, module: VariableTracker, name: str, make: Callable[[VariableTracker], VariableTracker]
) -> None:
    """From here on the program finds ``make(parameter)`` where it reads a parameter of a module, until
    `restore_parameter`.

    The module itself never changes, so there is nothing that the compiled code would have to do: a replacement ends in
    the frame in which it began. A parameter that is replaced already stays as it is.
    """
    items, key = _parameters(tx, module), _key(name)
    before = _before(tx, module, name)
    value = items[key]
    items[key] = value if before else make(value)
    before.append(value)


def restore_parameter(tx: Translator, module: VariableTracker, name: str) -> None:
    """Takes the last `replace_parameter` back."""
    before = _before(tx, module, name)
    if before:
        _parameters(tx, module)[_key(name)] = before.pop()
