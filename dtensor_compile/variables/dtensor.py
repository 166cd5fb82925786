"""DTensors: torch's own tracker serves. What it does not know is the spec of a DTensor that the program computed.

The spec of an input has a source and is traced like any Python object. The spec of a result is known while tracing, as far as its
sizes are not symbolic: mesh and placements follow from the guards on the inputs.
"""

from __future__ import annotations

import dataclasses

import torch

from dtensor_compile.compat.dtensor import Spec
from dtensor_compile.compat.dynamo import Translator, VariableTracker, build_unguarded, constant_source, graph_break, real_object


def track_spec(tx: Translator, spec: Spec) -> VariableTracker:
    """A tracker for the spec of an intermediate DTensor: a constant of the compiled code, with the real mesh in it."""
    meta = spec.tensor_meta
    if meta is not None and any(isinstance(size, torch.SymInt) for size in (*meta.shape, *meta.stride)):
        graph_break("symbolic-spec", f"{spec}")
    real = dataclasses.replace(spec, mesh=real_object(spec.mesh))
    return build_unguarded(tx, real, constant_source(tx, "spec", real))
