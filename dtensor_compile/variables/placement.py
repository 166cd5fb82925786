"""Placements: ``Shard``, ``Replicate``, ``Partial`` and their kin, instances and classes.

A placement is a value: torch guards it by equality, so that results of its members follow from the guard. Methods that
move data (``_split_tensor``) are traced like other code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Source,
    Translator,
    VariableTracker,
    build,
    constant_argument,
    constant_source,
    graph_break,
    raise_in_program,
    remember,
)
from dtensor_compile.variables.member_rules import MemberRule, OpaqueClass, Row, TableVariable, table


class PlacementVariable(TableVariable):
    kind = "placement"
    members = table(
        bake="""
            dim reduce_op split_factor is_shard is_partial is_replicate ALL_REDUCE_OPS LINEAR_REDUCE_OPS
            _split_factor_int __repr__ __str__ __hash__ __eq__ __ne__ __format__ __fx_repr__ __copy__ __deepcopy__
        """,
        inline="local_shard_size_and_offset",
        breaks={"object-state": "__setattr__ __delattr__ __dict__"},
    )
    outside = Row(MemberRule.INLINE)
    #: A placement contains nothing that a deep copy would have to copy.
    functions = {"__copy__": copy.copy, "__deepcopy__": copy.copy}

    @classmethod
    def track(
        cls, tx: Translator, proxy: Any, value: Any, source: Source | None, options: Mapping[str, Any]
    ) -> VariableTracker:
        """Creates the tracker; called in place of torch's factory. A placement created in the program is a constant of
        the code.
        """
        if source is None:
            return cls(proxy, value, source=constant_source(tx, cls.kind, value), **options)
        return remember(tx, value, cls(proxy, value, source=source, **options))


class PlacementClassVariable(OpaqueClass):
    """The class of placements, whose instances may be created with symbolic sizes."""

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
                "backend='dtensor' creates placements while tracing, and needs the values of their arguments then.",
            )
        try:
            return super().call_function(tx, fixed_args, fixed_kwargs)
        except TypeError as error:  # raised by the class: wrong arguments
            raise_in_program(tx, error)
