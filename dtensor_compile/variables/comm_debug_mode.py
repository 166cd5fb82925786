"""``CommDebugMode`` in a program, with the counts of eager.

The counts are constants of the compiled code: the collectives of eager in the scope follow from the guards of the code.
The graph may send less, since equal redistributions are shared and inverse ones cancel; ``dtensor_compile.record()``
shows its collectives. The mode does not follow modules here: all counts are those of "Global", and methods that need
more (``generate_comm_debug_tracing_table``) break the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode

from dtensor_compile.compat.dynamo.trackers.calls import handle_construction
from dtensor_compile.compat.dynamo.trackers.communication_counts import CommModeVariable
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack, TrackGiven
from dtensor_compile.ops import c10d as ops
from dtensor_compile.ops.redistribute import redistribute_op

_c10d = torch.ops.c10d

#: Operator of ours -> the one that eager runs; None for an operator that stands for more than one collective.
CommModeVariable.ours = {
    op.overloadpacket: eager
    for op, eager in {
        ops.all_reduce: _c10d.allreduce_,
        ops.broadcast: _c10d.broadcast_,
        ops.all_gather_into_tensor: _c10d._allgather_base_,
        ops.reduce_scatter_tensor: _c10d._reduce_scatter_base_,
        ops.all_to_all_single: _c10d.alltoall_base_,
        ops.reduce: _c10d.reduce_,
        ops.gather: _c10d.gather_,
        ops.scatter: _c10d.scatter_,
        ops.all_gather: _c10d.allgather_,
        ops.reduce_scatter: _c10d.reduce_scatter_,
        ops.all_to_all: _c10d.alltoall_,
        redistribute_op: None,
    }.items()
}

#: Classes of objects passed to the program, with the factory of their tracker.
TYPES: Mapping[type, TrackGiven] = {CommDebugMode: CommModeVariable.track}
#: Classes whose construction is handled here.
OBJECTS: tuple[tuple[Any, Retrack], ...] = ((CommDebugMode, handle_construction(CommModeVariable.make)),)
