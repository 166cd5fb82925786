"""Dynamo variable trackers for meshes, groups and placements, in place only while Dynamo traces for our backend.

How a value reaches one. torch treats meshes and process groups as *opaque references* (inputs of the graph) and placements as
*opaque values* (constants), and makes every tracker of them in one factory. While our backend traces, that factory asks `ENTRIES`
first (`compat.dynamo` says how the scope is kept). The trackers extend torch's own, so that all that works with those works with
these, and differ in three things: members follow a table (`members`), an object that a member or a node returns has a source,
and what torch leaves unguarded is guarded.

DTensors need no tracker: torch's serves, and their meshes and placements come here. Hooks neither.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dtensor_compile.compat.dynamo import Backend, Entries, install_while_tracing
from dtensor_compile.variables.device_mesh import DeviceMeshVariable
from dtensor_compile.variables.placement import PlacementVariable
from dtensor_compile.variables.process_group import ProcessGroupVariable

ENTRIES = Entries(
    opaque={
        DeviceMesh: DeviceMeshVariable.track,
        Placement: PlacementVariable.track,
        ProcessGroup: ProcessGroupVariable.track,
    },
)


def install_trackers(backend: Backend) -> None:
    """From now on the trackers are in place whenever Dynamo traces for `backend`."""
    install_while_tracing(backend, ENTRIES)
