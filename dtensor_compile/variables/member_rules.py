"""Tables of rules for the members of an object and the functions of a module, and trackers that follow them.

If a guard fixes an object, its members are fixed too. A table has a row per name, with one of these rules:

- `BAKE`: read or called with the real object while tracing; the result is a constant of the graph. Right for members
  without side effects whose result follows from guarded facts.
- `ASK`: as `BAKE`, with a guard on the answer, which may change between calls of the program.
- `READ`: data with a source, under guards of its own.
- `INLINE`: traced like any other Python code.
- `OPERATOR`: a call becomes operators of the graph, through a polyfill (``collectives.py``).
- `MAKE`: creates meshes or groups; called once per place of the program (``mesh_constructors.py``).
- `BREAK`: not traceable; an ordinary graph break with a cause (``causes.py``).

`TableVariable` looks up a member in the table of its class. A method that is in no table breaks the graph when called;
data that is in no table is read under a guard.

A mesh, group or placement that a member returns gets a tracker with a source (`SourcedVariable.track`), so that guards,
graph inputs and returned values work for it as they do for an input.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from dtensor_compile.causes import cause
from dtensor_compile.compat.dynamo.trackers.opaque_trackers import MemberVariable, OpaqueClassVariable, is_opaque_class
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Source,
    Translator,
    VariableTracker,
    build,
    build_member,
    build_unguarded,
    class_of,
    constant_argument,
    constant_source,
    describe_fake,
    graph_break,
    inline_member,
    member_function,
    raise_in_program,
    read_attribute,
    remember,
    tracked,
)


class MemberRule(enum.Enum):
    """Rule for tracing a member of an object."""

    BAKE = enum.auto()
    ASK = enum.auto()
    READ = enum.auto()
    INLINE = enum.auto()
    OPERATOR = enum.auto()
    MAKE = enum.auto()
    BREAK = enum.auto()


@dataclass(frozen=True)
class Row:
    """A row of a table: the rule, and for `MemberRule.BREAK` the code of the cause."""

    rule: MemberRule
    cause: str = ""

    def __post_init__(self) -> None:
        if self.rule is MemberRule.BREAK:
            cause(self.cause)  # raises if there is no such cause


Table = Mapping[str, Row]
_UNKNOWN = Row(MemberRule.BREAK, "member-not-traced")


def table(
    *,
    bake: str = "",
    ask: str = "",
    read: str = "",
    inline: str = "",
    operator: str = "",
    make: str = "",
    breaks: Mapping[str, str] | None = None,
) -> Table:
    """Builds a table from whitespace-separated names per rule; `breaks` has such names per code of a cause."""
    rules = {
        MemberRule.BAKE: bake,
        MemberRule.ASK: ask,
        MemberRule.READ: read,
        MemberRule.INLINE: inline,
        MemberRule.OPERATOR: operator,
        MemberRule.MAKE: make,
    }
    rows = {name: Row(rule) for rule, names in rules.items() for name in names.split()}
    refused = {name: Row(MemberRule.BREAK, code) for code, names in (breaks or {}).items() for name in names.split()}
    return {**rows, **refused}


def causes_of(rows: Table) -> Mapping[str, str]:
    """Code of the cause by name, for the rows that break a graph."""
    return {name: row.cause for name, row in rows.items() if row.rule is MemberRule.BREAK}


class TableVariable(MemberVariable):
    """An opaque object whose members follow a table.

    Class attributes:
        kind: name of such an object in messages.
        members: row per member.
        outside: row of all other members.
        functions: functions called with the object in place of methods, by name of the method, which the class may lack
            (``copy.copy`` looks up ``__copy__``).
    """

    kind: ClassVar[str]
    members: ClassVar[Table]
    outside: ClassVar[Row] = _UNKNOWN
    functions: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def python_type(self) -> type:
        return type(self.as_python_constant())

    def rule(self, name: str) -> MemberRule:
        return self.members.get(name, self.outside).rule

    def read_member(self, tx: Translator, name: str) -> VariableTracker:
        if name == "__class__":
            return class_of(self, tx)
        rule = self.rule(name)
        if rule is MemberRule.INLINE:
            return self._inline(tx, name)
        try:
            value = self.functions.get(name) or getattr(self.as_python_constant(), name)
        except Exception as error:  # noqa: BLE001 - whatever a property raises, the program sees it
            raise_in_program(tx, error)
        if callable(value) and rule is not MemberRule.READ and not isinstance(value, type):
            return member_function(self, name, lambda args, kwargs: self.call_method(tx, name, args, kwargs))
        if rule is MemberRule.READ:
            return build_member(self, tx, name, value)
        if rule is MemberRule.BAKE:
            return build(tx, value)
        return self.refuse(name) if name in self.members else self._inline(tx, name)

    def call_method(
        self, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        if name == "__deepcopy__":
            args = []  # the memo of deepcopy, which is not needed here
        rule = self.rule(name)
        if rule is MemberRule.BAKE:
            return self._call_real(tx, name, args, kwargs)
        if rule is MemberRule.INLINE:
            return self._inline(tx, name).call_function(tx, list(args), dict(kwargs))
        if rule is MemberRule.OPERATOR:
            return self.operate(tx, name, args, kwargs)
        if rule is MemberRule.MAKE:
            return self.make(tx, name, args, kwargs)
        self.refuse(name)

    def operate(
        self, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        """Traces a call of a member that becomes operators."""
        self.refuse(name)

    def make(
        self, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        """Traces a call of a member that creates meshes or groups."""
        self.refuse(name)

    def _inline(self, tx: Translator, name: str) -> VariableTracker:
        return inline_member(self, tx, name) or self.refuse(name)

    def call_obj_hasattr(self, tx: Translator, name: str) -> Any:
        return build(tx, name in self.functions or hasattr(self.as_python_constant(), name))

    def mp_subscript_impl(self, tx: Translator, key: VariableTracker) -> VariableTracker:
        return self.call_method(tx, "__getitem__", [key], {})

    def text(self, tx: Translator, method: str) -> VariableTracker:
        return self._call_real(tx, method, [], {})

    def _call_real(
        self, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        try:
            real_args = [constant_argument(arg) for arg in args]
            real_kwargs = {key: constant_argument(arg) for key, arg in kwargs.items()}
        except NotImplementedError:
            graph_break(
                "member-argument",
                f"{self}.{name}({', '.join(map(str, [*args, *kwargs.values()]))})",
                f"backend='dtensor' evaluates {type(self.as_python_constant()).__name__}.{name} while tracing, and "
                "needs the values of its arguments then.",
            )
        try:
            result = self.real_function(name)(*real_args, **real_kwargs)
        except Exception as error:  # noqa: BLE001 - whatever the method raises, the program sees it
            raise_in_program(tx, error)
        return build(tx, result)

    def real_function(self, name: str) -> Callable[..., Any]:
        """The function that a call of member `name` runs, with real arguments."""
        real = self.as_python_constant()
        return functools.partial(self.functions[name], real) if name in self.functions else getattr(real, name)

    def refuse(self, name: str) -> NoReturn:
        """Breaks the graph at a member that is not traced."""
        cls = type(self.as_python_constant()).__name__
        code = self.members.get(name, _UNKNOWN).cause or _UNKNOWN.cause
        explanation = f"backend='dtensor' does not trace the member '{name}' of {cls}. {cause(code).why}"
        graph_break(code, f"{self}.{name}", explanation)


class OpaqueClass(OpaqueClassVariable):
    """The class of such objects, as torch tracks it. Calls of its C++ methods are calls of methods of their first
    argument.
    """

    @classmethod
    def retrack(cls, stock: VariableTracker) -> VariableTracker:
        if not is_opaque_class(stock):
            return stock
        return cls(stock.as_python_constant(), source=stock.source)

    def var_getattr(self, tx: Translator, name: str) -> VariableTracker:
        found = inspect.getattr_static(self.as_python_constant(), name, None)
        if type(found).__name__ == "instancemethod":
            return member_function(
                self, name, lambda args, kwargs: args[0].realize().call_method(tx, name, args[1:], kwargs)
            )
        return read_attribute(super(), tx, name)

    tp_getattro_impl = var_getattr  # since 2.14


class SourcedVariable(TableVariable):
    """An opaque object with an identity (a mesh, a group), always tracked with a source, once per frame."""

    @classmethod
    def track(
        cls, tx: Translator, proxy: Any, value: Any, source: Source | None, options: Mapping[str, Any]
    ) -> VariableTracker:
        """Creates the tracker; called in place of torch's factory.

        An object without a source was computed by a node of the graph or by a member. While the guards hold, it is
        always this object, so that it is tracked as the input that it is, or else as a constant.
        """
        variable = cls(proxy, value, source=source, **options)
        real = variable.as_python_constant()
        if source is None:
            return tracked(tx, real) or build_unguarded(tx, real, constant_source(tx, cls.kind, real))
        describe_fake(value)
        cls.guard(source)
        return remember(tx, real, variable)

    @classmethod
    def guard(cls, source: Source) -> None:
        """Installs guards for state that torch's own guards on `source` leave open."""
