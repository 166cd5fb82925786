"""Dependencies of the trace of a call, as values that can be compared with those of another call.

No comparison here adds a guard: symbolic sizes are compared as expressions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.utils import get_torch_function_mode_stack
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import Guard, Source
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from dtensor_compile.compat.distributed.device_meshes import real_mesh
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator
from dtensor_compile.compat.patches import if_there

_CHECKS: Mapping[str, Any] = if_there("torch._dynamo.guards:GUARD_VALUE_DISPATCH") or {}
_SKIPPED = if_there("torch._dynamo.guards:SKIP_GUARD")


class Differs(Exception):
    """The nodes of one call cannot be copied for another; the message gives the reason."""


def _size(size: Any) -> Any:
    return str(size.node.expr) if isinstance(size, torch.SymInt) else size


def tensor_facts(value: torch.Tensor) -> tuple[Any, ...]:
    """The metadata of a tensor; of a DTensor, also its mesh, its placements and the metadata of its local tensor."""
    spec: tuple[Any, ...] = ()
    if isinstance(value, DTensor):
        spec = real_mesh(value._spec.mesh), value._spec.placements, tensor_facts(value._local_tensor)
    strides = tuple(map(_size, value.stride())) if value.layout == torch.strided else ()
    extents = (*map(_size, value.shape), strides)
    return type(value), extents, value.dtype, value.device, value.requires_grad, value.layout, spec


#: A fact about a part of the arguments of a call, with the tracker of that part if it is in the graph.
Fact = tuple[Any, VariableTracker | None]


def flat_facts(variable: VariableTracker) -> Iterator[Fact]:
    """Facts about a value and everything that it contains. Values other than tensors, sizes, constants and plain
    containers are equal for two calls if they are one object."""
    variable = variable.realize()
    if isinstance(variable, TensorVariable):
        yield ("tensor", type(variable), *tensor_facts(variable.as_proxy().node.meta["example_value"])), variable
    elif isinstance(variable, SymNodeVariable):
        yield ("size", _size(variable.sym_num)), variable
    elif isinstance(variable, ConstantVariable):
        yield ("constant", type(variable.value), variable.value, repr(variable.value)), None  # -0.0 is not 0.0
    elif isinstance(variable, (TupleVariable, ListVariable)) and type(variable) in (TupleVariable, ListVariable):
        yield (type(variable), len(variable.items)), None
        for item in variable.items:
            yield from flat_facts(item)
    elif type(variable) is ConstDictVariable:
        yield (ConstDictVariable, len(variable.items)), None
        for key, item in variable.items.items():
            yield from flat_facts(key.vt)
            yield from flat_facts(item)
    else:
        yield ("object", _Same(variable)), None


class _Same:
    """Equals another if both are of one tracker, which this keeps alive."""

    def __init__(self, variable: VariableTracker) -> None:
        self.variable = variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.variable is self.variable

    __hash__ = None  # type: ignore[assignment]


def argument_facts(args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]) -> list[Fact]:
    """Facts about the arguments of a call."""
    named = [("names", len(args), *kwargs), None]
    return [(named[0], None), *(fact for argument in (*args, *kwargs.values()) for fact in flat_facts(argument))]


def state_check() -> Callable[[], bool]:
    """A function that returns whether the global state of torch (grad mode, autocast, default dtype, modes) is
    unchanged."""
    state, modes = torch._C._dynamo.guards.GlobalStateGuard(), _modes()
    return lambda: bool(state.check()) and modes == _modes()


def _modes() -> list[type]:
    return [type(mode) for mode in get_torch_function_mode_stack()]


class OtherModule:
    """Maps sources below one module to those below another, and reads their values."""

    def __init__(self, tx: Translator, old: Source, new: Source) -> None:
        root = tx.output.root_tx
        self._scope = {"G": root.f_globals, "L": root.f_locals}
        self._locals: dict[str, Any] = {}
        self._values: dict[Source, Any] = {}
        self._sources: dict[Source, Source] = {old: new}

    def source(self, source: Source) -> Source:
        """The source of the same thing below the other module. (``source.clone`` copies each chain whole.)"""
        if source not in self._sources:
            parts = [(part.name, getattr(source, part.name)) for part in dataclasses.fields(source)]
            old = {name: part for name, part in parts if isinstance(part, Source)}
            new = {name: self.source(part) for name, part in old.items()}
            same = all(new[name] is part for name, part in old.items())
            self._sources[source] = source if same else dataclasses.replace(source, **new)  # type: ignore[type-var]
        return self._sources[source]

    def value(self, source: Source) -> Any:
        """The value of a source.

        Raises:
            Differs: there is none.
        """
        try:
            return source.get_value(self._scope, self._locals, self._values)
        except Exception:  # noqa: BLE001 - whatever reading it raises
            raise Differs(f"{source.name} is missing") from None


def chain(source: Source) -> Iterator[Source]:
    """The source, and those that it is built on."""
    found: Source | None = source
    while found is not None:
        yield found
        found = getattr(found, "base", None)


@dataclasses.dataclass
class GuardFact:
    """A guard of the traced call, and how to make it for another one.

    Attributes:
        source: of what is guarded.
        check: whether another value passes; None if `same_as` is the whole guard.
        create: the function of the guard.
        same_as: the source of the same object, of a guard on identity; None for other guards.
    """

    source: Source
    check: Callable[[Any], bool] | None
    create: Callable[..., Any]
    same_as: Source | None = None

    def moved(self, other: OtherModule) -> tuple[Source, Callable[..., Any]]:
        """The guard for another module: its source and its function.

        Raises:
            Differs: the other module does not pass.
        """
        source = other.source(self.source)
        value = other.value(source)
        if self.check is not None and not _passes(self.check, value):
            raise Differs(f"{source.name} differs")
        if self.same_as is None:
            settings = getattr(self.create, "keywords", {})
            if isinstance(settings.get("value"), TensorWeakRef):
                return source, functools.partial(self.create.func, value=TensorWeakRef(value))  # type: ignore[attr-defined]
            return source, self.create
        same_as = other.source(self.same_as)
        if value is not other.value(same_as):
            raise Differs(f"{source.name} is not {same_as.name}")
        return source, functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=same_as)


def add_guards(tx: Translator, guards: Sequence[tuple[Source, Callable[..., Any]]]) -> None:
    """Installs guards, but for those on tensors that have one already, as inputs of the graph have."""
    of = tx.output.guards.get_guards_for_source
    known = {source for source, _ in guards if any(guard.create_fn_name() in _OF_TENSORS for guard in of(source))}
    for source, create in guards:
        guard = source.make_guard(create)
        if source not in known or guard.create_fn_name() not in _OF_TENSORS:
            install_guard(guard)


#: Guards of which a tensor has one.
_OF_TENSORS = {"TENSOR_MATCH", "DTENSOR_MATCH", "DUPLICATE_INPUT"}


def guards_below(tx: Translator, module: Source) -> list[GuardFact]:
    """The guards installed so far on a module and everything below it.

    Raises:
        Differs: the check of one of them is unknown.
    """
    is_below, here = _below(module), OtherModule(tx, module, module)
    guards = [guard for guard in tx.output.guards if is_below(guard.originating_source)]
    return [fact for guard in guards if (fact := _fact(guard, here)) is not None]


def ordered_below(tx: Translator, module: Source) -> list[Source]:
    """The dicts below a module whose order of keys is guarded."""
    return list(filter(_below(module), tx.output.guard_on_key_order))


def _below(module: Source) -> Callable[[Source | None], bool]:
    """Whether a source is that of a module or of something below it."""
    known: dict[Source, bool] = {module: True}

    def is_below(source: Source | None) -> bool:
        if source is None:
            return False
        if source not in known:
            known[source] = is_below(getattr(source, "base", None))
        return known[source]

    return is_below


def _fact(guard: Guard, here: OtherModule) -> GuardFact | None:
    source, name = guard.originating_source, guard.create_fn_name()
    if name == "DUPLICATE_INPUT":
        return GuardFact(source, None, guard.create_fn, guard.create_fn.keywords["source_b"])  # type: ignore[attr-defined]
    check = _check(guard, name, here.value(source))
    return None if check is None else GuardFact(source, check, guard.create_fn)


def _check(guard: Guard, name: str, value: Any) -> Callable[[Any], bool] | None:
    facts = getattr(guard.create_fn, "facts", None)
    if name == "DTENSOR_MATCH":
        facts = _facts_of_input
    if name == "TYPE_MATCH":
        return lambda other: _same_class(type(other), type(value))
    if facts is not None:
        expected = facts(value)
        return lambda other: bool(facts(other) == expected)
    stock = _CHECKS.get(name)
    if stock is _SKIPPED:
        return None  # about no object of the program
    if stock is None or not hasattr(type(stock), "_fields"):
        raise Differs(f"a guard {name} cannot be checked for another module")
    metadata = stock.get_metadata_fn(guard, value)
    return lambda other: bool(stock.eval_fn(other, metadata))


def _passes(check: Callable[[Any], bool], value: Any) -> bool:
    """Whether an object passes a check, which may be for objects of another kind (the length of None)."""
    try:
        return check(value)
    except Exception:  # noqa: BLE001 - guards of torch's raise what their code raises
        return False


def _same_class(one: type, other: type) -> bool:
    """Whether two classes are one, or those that ``torch.nn.utils.parametrize`` made of one for two modules."""
    if one is other:
        return True
    states = [getattr(vars(cls).get("__getstate__"), "__qualname__", "") for cls in (one, other)]
    made = all(state.startswith("_inject_new_class.") for state in states)
    return made and one.__bases__ == other.__bases__ and vars(one).keys() == vars(other).keys()


def _facts_of_input(value: Any) -> Any:
    return tensor_facts(value) if isinstance(value, torch.Tensor) else type(value)
