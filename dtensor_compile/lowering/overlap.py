"""Passes over a lowered graph, in the order in which they run: the form of each collective, how many of them, the order of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.lowering.bucket import bucket_collectives as bucket
from dtensor_compile.lowering.reduce_by_exchange import reduce_by_exchange
from dtensor_compile.lowering.schedule import Simulation
from dtensor_compile.lowering.schedule_graph import cluster_for, schedule_graph
from dtensor_compile.passes import Pass
from dtensor_compile.topology.links import Cluster

#: Names under which they can be left out.
LOWERED_PASSES: tuple[str, ...] = ("bucket_collectives", "reduce_by_exchange", "schedule_graph")
#: Those that run only for a topology that the user names, whose latency says what pays, or where the user asks for them.
LOWERED_OPTIONAL: tuple[str, ...] = ("bucket_collectives",)


def passes_after_lowering(topology: Cluster | None, overlap_memory: float, enabled: Sequence[str] = ()) -> tuple[Pass, ...]:
    """The passes, for `run_passes`.

    Args:
        topology: of the job; None for the default of the device.
        overlap_memory: part of the peak that the order may add.
        enabled: names of `LOWERED_OPTIONAL` ones that run without a topology too.
    """

    def bucket_collectives(graph: torch.fx.Graph) -> list[Decision]:
        cluster = cluster_for(graph, topology)
        return bucket(graph, cluster) if cluster is not None else []

    def in_order(graph: torch.fx.Graph) -> list[Decision]:
        return schedule_graph(graph, topology, overlap_memory)

    in_order.__name__ = schedule_graph.__name__
    passes = (bucket_collectives, reduce_by_exchange, in_order)
    return tuple(run for run in passes if topology is not None or run.__name__ not in LOWERED_OPTIONAL or run.__name__ in enabled)


def kernels_in_order(before: Simulation, after: Simulation) -> Decision:
    """What is predicted for the kernels of a graph, in Inductor's order and in ours."""

    def text(found: Simulation) -> str:
        return f"{sum(found.exposed.values()) * 1e3:.2f} ms exposed"

    reason = (
        f"{len(after.exposed)} collectives; {before.seconds * 1e3:.2f} ms and {before.peak:,} bytes at most become "
        f"{after.seconds * 1e3:.2f} ms and {after.peak:,} bytes"
    )
    return Decision("schedule_kernels", "", reason, text(before), text(after))
