"""Placements: ``Shard``, ``Replicate``, ``Partial`` and their kin, instances and classes.

A placement is a value: torch guards it by equality, so whatever a member says follows from the guard. Methods that move data
(``_split_tensor``) are traced like other code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from dtensor_compile.compat.dynamo import (
    OpaqueClassVariable,
    Source,
    Translator,
    VariableTracker,
    build,
    constant_argument,
    constant_source,
    graph_break,
    member_function,
    remember,
)
from dtensor_compile.variables.members import Rule, TableVariable, table


#: What ``copy.copy`` and ``copy.deepcopy`` ask of an object. A placement has nothing in it that a deep copy would share.
_COPIES = frozenset({"__copy__", "__deepcopy__"})


class PlacementVariable(TableVariable):
    kind = "placement"
    members = table(
        bake="dim reduce_op split_factor is_shard is_partial is_replicate __repr__ __str__ __hash__ __eq__ __ne__ __format__"
    )
    outside = Rule.INLINE

    @classmethod
    def track(cls, tx: Translator, proxy: Any, value: Any, source: Source | None, options: Mapping[str, Any]) -> VariableTracker:
        """Makes the tracker; called in place of torch's factory. A placement made in the program is a constant of the code."""
        if source is None:
            return cls(proxy, value, source=constant_source(tx, cls.kind, value), **options)
        return remember(tx, value, cls(proxy, value, source=source, **options))

    def read_member(self, tx: Translator, name: str) -> VariableTracker:
        if name in _COPIES:
            return member_function(self, name, lambda args, kwargs: self.call_method(tx, name, args, kwargs))
        return super().read_member(tx, name)

    def call_method(
        self, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        if name in _COPIES:
            return build(tx, copy.copy(self.as_python_constant()))
        return super().call_method(tx, name, args, kwargs)

    def call_obj_hasattr(self, tx: Translator, name: str) -> VariableTracker:
        return build(tx, True) if name in _COPIES else super().call_obj_hasattr(tx, name)


class PlacementClassVariable(OpaqueClassVariable):
    """The class, as torch tracks it; its instances may be made with sizes that are symbolic."""

    @classmethod
    def retrack(cls, stock: VariableTracker) -> VariableTracker:
        if not isinstance(stock, OpaqueClassVariable):
            return stock
        return cls(stock.as_python_constant(), source=stock.source)

    def call_function(
        self, tx: Translator, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        try:
            fixed_args = [build(tx, constant_argument(arg)) for arg in args]
            fixed_kwargs = {key: build(tx, constant_argument(arg)) for key, arg in kwargs.items()}
        except NotImplementedError:
            graph_break(
                "placement-argument",
                f"{self.value.__name__}({', '.join(map(str, [*args, *kwargs.values()]))})",
                "backend='dtensor' makes placements while it traces, and needs the values of their arguments then.",
            )
        return super().call_function(tx, fixed_args, fixed_kwargs)
