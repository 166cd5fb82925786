"""Trackers that decide by a table what becomes of each member of an object.

An object that a guard holds fixed has members that are fixed too. `TableVariable` looks a member up in the table of its class:

- `BAKE`: read or called with the real object while tracing; the result is a constant of the graph. Right for members whose
  result follows from what is guarded, and that change nothing.
- `READ`: data with a source, under guards of its own.
- `INLINE`: traced like any other Python code of the class.
- `BREAK`: a call is not traceable; an ordinary graph break that says so. (Data that no table names is read under a guard.)

Whatever a member returns that is itself a mesh, a group or a placement gets a tracker with a source
(`SourcedVariable.track`), so that guards, graph inputs and returned values work for it as they do for an input.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from dtensor_compile.compat.dynamo import (
    MemberVariable,
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
    remember,
    tracked,
)


class Rule(enum.Enum):
    """What becomes of a member of an object."""

    BAKE = enum.auto()
    READ = enum.auto()
    INLINE = enum.auto()
    BREAK = enum.auto()


def table(*, bake: str = "", read: str = "", inline: str = "") -> Mapping[str, Rule]:
    """A table from lists of names, separated by white space."""
    rules = {Rule.BAKE: bake, Rule.READ: read, Rule.INLINE: inline}
    return {name: rule for rule, names in rules.items() for name in names.split()}


class TableVariable(MemberVariable):
    """An opaque object whose members follow a table.

    Class attributes:
        kind: what a message calls such an object.
        members: rule per member.
        outside: rule for all other members.
    """

    kind: ClassVar[str]
    members: ClassVar[Mapping[str, Rule]]
    outside: ClassVar[Rule] = Rule.BREAK

    def python_type(self) -> type:
        return type(self.as_python_constant())

    def rule(self, name: str) -> Rule:
        return self.members.get(name, self.outside)

    def read_member(self, tx: Translator, name: str) -> VariableTracker:
        if name == "__class__":
            return class_of(self, tx)
        rule = self.rule(name)
        if rule is Rule.INLINE:
            return self._inline(tx, name)
        try:
            value = getattr(self.as_python_constant(), name)
        except Exception as error:  # noqa: BLE001 - whatever a property raises, the program sees it
            raise_in_program(tx, error)
        if callable(value):
            return member_function(self, name, lambda args, kwargs: self.call_method(tx, name, args, kwargs))
        if rule is Rule.READ:
            return build_member(self, tx, name, value)
        return build(tx, value) if rule is Rule.BAKE else self._inline(tx, name)

    def call_method(
        self, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        rule = self.rule(name)
        if rule is Rule.BAKE:
            return self._call_real(tx, name, args, kwargs)
        if rule is Rule.INLINE:
            return self._inline(tx, name).call_function(tx, list(args), dict(kwargs))
        self.refuse(name)

    def _inline(self, tx: Translator, name: str) -> VariableTracker:
        return inline_member(self, tx, name) or self.refuse(name)

    def call_obj_hasattr(self, tx: Translator, name: str) -> VariableTracker:
        return build(tx, hasattr(self.as_python_constant(), name))

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
                f"backend='dtensor' evaluates {type(self.as_python_constant()).__name__}.{name} while it traces, and needs the "
                "values of its arguments then.",
            )
        try:
            result = getattr(self.as_python_constant(), name)(*real_args, **real_kwargs)
        except Exception as error:  # noqa: BLE001 - whatever the method raises, the program sees it
            raise_in_program(tx, error)
        return build(tx, result)

    def refuse(self, name: str) -> NoReturn:
        """The graph break for a member that is not traced."""
        cls = type(self.as_python_constant()).__name__
        graph_break(
            "member-not-traced",
            f"{self}.{name}",
            f"backend='dtensor' does not trace the member '{name}' of {cls}: it may change the {self.kind} or depend on more "
            "than what is guarded.",
            f"Use '{name}' outside of the compiled function and pass its result in.",
        )


class SourcedVariable(TableVariable):
    """An opaque object with an identity (a mesh, a group): always tracked with a source, and once per frame."""

    @classmethod
    def track(cls, tx: Translator, proxy: Any, value: Any, source: Source | None, options: Mapping[str, Any]) -> VariableTracker:
        """Makes the tracker; called in place of torch's factory.

        An object without a source was computed by a node of the graph or by a member. While the guards hold it is always this
        one, so that the tracker of an input serves where it is one, and a constant where it is not.
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
        """Installs what torch's own guards on `source` leave open."""
