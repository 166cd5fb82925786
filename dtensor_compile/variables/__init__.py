"""Dynamo variable trackers for meshes, groups and placements, active only while Dynamo traces for our backend.

torch treats meshes and process groups as *opaque references* (inputs of the graph) and placements as *opaque values*
(constants), and creates all of their trackers in one factory. While our backend traces, that factory consults `ENTRIES`
first (`compat.dynamo.tracing` documents the scope). Our trackers extend torch's, so that everything that works with
those works with these, and differ in three respects: members follow a table (`member_rules`), an object that a member
or a node returns has a source, and state that torch leaves unguarded is guarded.

DTensors and backward hooks have no trackers of ours: they use torch's, with our trackers for meshes and placements.
"""

from __future__ import annotations

import dataclasses

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dtensor_compile.capture.checks import check_redistributions
from dtensor_compile.capture.sharding_rules import rules_while_tracing
from dtensor_compile.compat.aot.symbolic.symbol_reads import quick_expressions
from dtensor_compile.compat.aot.symbolic.symbol_results import results_computed_once
from dtensor_compile.compat.dtensor.local_sizes import local_sizes_follow_global_ones
from dtensor_compile.compat.dtensor.specs import MaskPartial, Spec, StridedShard
from dtensor_compile.compat.dynamo import older_dynamo
from dtensor_compile.compat.dynamo.guards import track_and_guard
from dtensor_compile.compat.dynamo.module_floats import floats_of_modules_are_numbers
from dtensor_compile.compat.dynamo.replay.compile_regions import regions_called
from dtensor_compile.compat.dynamo.replay.replayed_calls import blocks_traced_once
from dtensor_compile.compat.dynamo.tracing import install_while_tracing
from dtensor_compile.compat.dynamo.trackers.constant_tensors import read_constant_tensors
from dtensor_compile.compat.dynamo.trackers.mesh_guards import meshes_guarded_by_value
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Backend, Contexts, Entries, Objects
from dtensor_compile.compat.dynamo.unread_logs import without_unread_logs
from dtensor_compile.compat.inductor.input_fetch_codegen import inputs_in_one_walk
from dtensor_compile.fixups.convolution_messages import edges_of_convolutions
from dtensor_compile.garbage_collection import rare_collections
from dtensor_compile.variables import backward_hooks as hooks
from dtensor_compile.variables import (
    collective_calls,
    comm_debug_mode,
    data_dependent,
    data_parallel,
    dense_tensors,
    optimizer,
    printing,
    random,
)
from dtensor_compile.variables import mesh_constructors as factories
from dtensor_compile.variables import torch_distributed_table as functions
from dtensor_compile.variables.device_mesh import DeviceMeshVariable
from dtensor_compile.variables.dtensor import refuse_members, track_spec
from dtensor_compile.variables.member_rules import OpaqueClass
from dtensor_compile.variables.placement import PlacementClassVariable, PlacementVariable
from dtensor_compile.variables.process_group import ProcessGroupVariable

ENTRIES = Entries(
    opaque={
        DeviceMesh: DeviceMeshVariable.track,
        Placement: PlacementVariable.track,
        ProcessGroup: ProcessGroupVariable.track,
    },
    made={Spec: track_spec, **functions.MADE},
    objects=(
        *(
            (cls, PlacementClassVariable.retrack)
            for cls in (Placement, Shard, Replicate, Partial, StridedShard, MaskPartial)
        ),
        (ProcessGroup, OpaqueClass.retrack),
        *optimizer.OBJECTS,
        *hooks.OBJECTS,
        *factories.OBJECTS,
        *printing.OBJECTS,
        *random.OBJECTS,
        *comm_debug_mode.OBJECTS,
        *data_dependent.OBJECTS,
        *dense_tensors.OBJECTS,
        *collective_calls.OBJECTS,
        *functions.OBJECTS,
        *older_dynamo.OBJECTS,
    ),
    tensors={DTensor: track_and_guard},
    given={**functions.GIVEN, **random.TYPES, **comm_debug_mode.TYPES},
    contexts=(
        rare_collections,
        check_redistributions,
        rules_while_tracing,
        edges_of_convolutions,
        read_constant_tensors,
        *data_dependent.CONTEXTS,
        factories.keep_leaves,
        refuse_members,
        *printing.CONTEXTS,
        *functions.CONTEXTS,
        *optimizer.CONTEXTS,
        *hooks.CONTEXTS,
        *random.CONTEXTS,
        *data_parallel.CONTEXTS,
        *older_dynamo.CONTEXTS,
        inputs_in_one_walk,
        local_sizes_follow_global_ones,
        floats_of_modules_are_numbers,
        quick_expressions,
        results_computed_once,
        blocks_traced_once,
        regions_called,
        without_unread_logs,
        meshes_guarded_by_value,
    ),
)


def install_trackers(backend: Backend, objects: Objects = (), contexts: Contexts = ()) -> None:
    """Activates the trackers whenever Dynamo traces for `backend`.

    Args:
        objects, contexts: those of an extension, as in `compat.dynamo.tracing.Entries`; they come after the others.
    """
    extended = dataclasses.replace(
        ENTRIES, objects=(*ENTRIES.objects, *objects), contexts=(*ENTRIES.contexts, *contexts)
    )
    install_while_tracing(backend, extended)
