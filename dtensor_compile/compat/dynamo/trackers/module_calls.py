"""Handled calls of Python functions and methods, and replaced parameters of a module, while tracing.

Built on ``compat/dynamo/tracing.py``; active only while Dynamo traces for our backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch._dynamo.source import AttrSource, GetItemSource
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.user_defined import UserDefinedDictVariable
from torch._guards import GuardSource

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.trackers.calls import Call, attribute
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, source_of
from dtensor_compile.compat.patches import hook, if_there, needs, patch

if TYPE_CHECKING:
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

_Dict: Any = ConstDictVariable  # up to 2.12 the class below is a member of it
#: A tracker as a key of a dict.
_HashableTracker: Any = if_there("torch._dynamo.variables.hashable:HashableTracker") or _Dict._HashableTracker
#: Finds the handler of a call of a Python function; None if it is traced as usual.
FindCall = Callable[[UserFunctionVariable], "Call | None"]


_CALL = patch("torch._dynamo.variables.functions:UserFunctionVariable.call_function", "self tx args kwargs")
_CALL_METHOD = patch("torch._dynamo.variables.functions:UserMethodVariable.call_function", "self tx args kwargs")
#: Calls of functions; those of methods, too, where the tracker of a method is not one of a function, as of 2.15.
_IS_FUNCTION = isinstance(UserMethodVariable, type) and issubclass(UserMethodVariable, UserFunctionVariable)
CALLS = (_CALL,) if _IS_FUNCTION else (_CALL, _CALL_METHOD)
_IS_OF_MODULE = patch("torch._guards:GuardSource.is_unspecialized_nn_module", "self")


@needs(
    "functions of torch that are traced in our form",
    *CALLS,
    without="some programs break the graph",
    upstream="not reported: an extension point, substitute_in_graph applies to all backends",
    remove_when="torch.compiler.substitute_in_graph can be limited to a backend, and takes methods",
)
@contextlib.contextmanager
def handle_functions(find: FindCall) -> Iterator[None]:
    """While active, calls of Python functions and methods in frames for our backend go to the handler that `find`
    returns.

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

    with contextlib.ExitStack() as stack:
        for row in CALLS:
            stack.enter_context(patched(row, call_function))
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

    Dynamo treats the ints of a module, and the sizes of its buffers, as constants whatever ``dynamic`` says, but not
    for a module that is marked as sharded. A symbolic head size turns all sizes that depend on it into quotients.
    """

    def is_of_module(stock: Any, self: GuardSource) -> bool:
        return stock(self) or self.is_fsdp_module()

    with patched(_IS_OF_MODULE, is_of_module):
        yield


def member(tx: Translator, owner: VariableTracker, path: Sequence[str | int]) -> VariableTracker:
    """The object at a path of attributes and list indices from `owner`, as an input of the graph."""
    source, value = source_of(owner), real_value(tx, owner)
    for part in path:
        source = AttrSource(source, part) if isinstance(part, str) else GetItemSource(source, part)
        value = getattr(value, part) if isinstance(part, str) else value[part]
    return VariableTracker.build(tx, value, source)


def real_value(tx: Translator, variable: VariableTracker) -> Any:
    """The real object of a tracker with a source."""
    source = source_of(variable)
    if hasattr(tx.output, "resolve_source_value"):
        return tx.output.resolve_source_value(source)
    return source.get_value({"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}, {}, {})  # before 2.13


def function_of(variable: UserFunctionVariable) -> Any:
    """The function that is called, unbound."""
    return variable.get_function()


def tuple_of(*items: VariableTracker) -> VariableTracker:
    """``(*items)``"""
    return TupleVariable(list(items))


def items_of(variable: VariableTracker) -> Sequence[VariableTracker]:
    """The items of a tuple."""
    assert isinstance(variable, TupleVariable), variable
    return variable.items


def dict_of(items: Mapping[str, VariableTracker]) -> VariableTracker:
    """``{**items}``"""
    keyed = {ConstantVariable.create(key): value for key, value in items.items()}
    return ConstDictVariable(keyed, mutation_type=ValueMutationNew())


def submodule(tx: Translator, module: VariableTracker, path: str) -> VariableTracker:
    """The tracker of ``module.get_submodule(path)``."""
    for name in path.split(".") if path else ():
        module = attribute(tx, module, name).realize()
    return module


# ---- replaced parameters ---------------------------------------------------------------------------------


def notes(tx: Translator, name: str) -> dict[Any, Any]:
    """The notes under `name` of this attempt to trace this frame."""
    return vars(tx.output).setdefault(f"dtensor_compile_{name}", {})


def happens_once(tx: Translator, what: str) -> None:
    """Records a side effect of the code being traced that copies of its nodes would not repeat; `what` is a sentence,
    "it ..."."""
    happened = notes(tx, "happened")
    happened[len(happened)] = what


def _parameters(tx: Translator, module: VariableTracker) -> dict[Any, VariableTracker]:
    found = attribute(tx, module, "_parameters").realize()
    variable = found._base_vt if isinstance(found, UserDefinedDictVariable) else found
    assert isinstance(variable, ConstDictVariable)
    return variable.items


def _key(name: str) -> Any:
    return _HashableTracker(ConstantVariable.create(name))


def _before(tx: Translator, module: VariableTracker, name: str) -> list[VariableTracker]:
    """The previous values of the parameter, one per active replacement, the last one last."""
    return notes(tx, "replaced").setdefault(_place(module, name), [])


def _place(module: VariableTracker, name: str) -> tuple[int, str]:
    return id(cast("UserDefinedObjectVariable", module.realize()).value), name


def parameter_of(tx: Translator, module: VariableTracker, name: str) -> VariableTracker | None:
    """A parameter of a module; None if it is replaced already."""
    return None if _before(tx, module, name) else _parameters(tx, module)[_key(name)]


def replace_parameter(tx: Translator, module: VariableTracker, name: str, value: VariableTracker | None) -> None:
    """Makes the program read `value` instead of a parameter of a module, until `restore_parameter`.

    The module itself never changes, so the compiled code has nothing to do: a replacement ends in the frame where it
    began. A nested replacement has no effect, and needs no value (`parameter_of`).
    """
    items, key = _parameters(tx, module), _key(name)
    before = _before(tx, module, name)
    before.append(items[key])
    if len(before) == 1:
        assert value is not None, name
        items[key] = value
    notes(tx, "replaced_by")[_place(module, name)] = items[key]


def restore_parameter(tx: Translator, module: VariableTracker, name: str) -> None:
    """Undoes the last `replace_parameter`."""
    before = _before(tx, module, name)
    if before:
        _parameters(tx, module)[_key(name)] = before.pop()
    if not before:
        notes(tx, "replaced_by").pop(_place(module, name), None)
