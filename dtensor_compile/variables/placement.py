"""Placements: ``Shard``, ``Replicate``, ``Partial`` and their kin, instances and classes.

A placement is a value: torch guards it by equality, so whatever a member says follows from the guard. Methods that move data
(``_split_tensor``) are traced like other code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtensor_compile.compat.dynamo import Source, Translator, VariableTracker, constant_source
from dtensor_compile.variables.members import Rule, TableVariable, table


class PlacementVariable(TableVariable):
    kind = "placement"
    members = table(
        bake="dim reduce_op split_factor is_shard is_partial is_replicate __repr__ __str__ __hash__ __eq__ __ne__ __format__"
    )
    outside = Rule.INLINE

    @classmethod
    def track(cls, tx: Translator, proxy: Any, value: Any, source: Source | None, options: Mapping[str, Any]) -> VariableTracker:
        """Makes the tracker; called in place of torch's factory. A placement made in the program is a constant of the code."""
        return cls(proxy, value, source=source or constant_source(tx, cls.kind, value), **options)
