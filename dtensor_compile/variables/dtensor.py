"""DTensors, with torch's own tracker. This module adds methods that do not return tensors, and specs of results.

The spec of an input has a source and is traced like any Python object. The spec of a result is known while tracing
unless its sizes are symbolic: mesh and placements follow from the guards on the inputs.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.dtensor.specs import Spec
from dtensor_compile.compat.dynamo.trackers.calls import refuse_tensor_members
from dtensor_compile.compat.dynamo.trackers.tracker_tools import (
    Translator,
    VariableTracker,
    build_unguarded,
    constant_source,
    graph_break,
    real_object,
)
from dtensor_compile.variables.member_rules import causes_of, table

#: Rules of the members that a DTensor has and a tensor does not.
MEMBERS = table(
    inline="""
        from_local to_local full_tensor redistribute device_mesh placements _local_tensor _spec _op_dispatcher
        __get_tensor_shard__ __coerce_tangent_metadata__ __coerce_same_metadata_as_tangent__ __slots__
        __tensor_unflatten__ _raise_if_contains_partial_placements
    """,
    breaks={
        "not-a-tensor": "__create_chunk_list__ __create_write_items__ __tensor_flatten__ _stable_hash_for_caching",
        "object-state": "__dict__",
    },
)


def refuse_members() -> AbstractContextManager[None]:
    """Context in which the members that `MEMBERS` refuses break the graph."""
    return refuse_tensor_members(DTensor, causes_of(MEMBERS))


def track_spec(tx: Translator, spec: Spec) -> VariableTracker:
    """Tracker for the spec of an intermediate DTensor: a constant of the compiled code, containing the real mesh."""
    meta = spec.tensor_meta
    if meta is not None and any(isinstance(size, torch.SymInt) for size in (*meta.shape, *meta.stride)):
        graph_break("symbolic-spec", f"{spec}")
    real = dataclasses.replace(spec, mesh=real_object(spec.mesh))
    return build_unguarded(tx, real, constant_source(tx, "spec", real))
