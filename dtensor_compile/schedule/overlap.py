"""Passes over a lowered graph, in the order in which they run: decomposition of matmuls, form and number of
collectives, order of all nodes.
"""

from __future__ import annotations

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.schedule.bucket import bucket_collectives as bucket
from dtensor_compile.schedule.decompose import decompose_matmuls as decompose
from dtensor_compile.schedule.left_alone import left_out_of_buckets, matmuls_left_whole
from dtensor_compile.schedule.schedule_graph import cluster_for
from dtensor_compile.schedule.simulated_device import Simulation
from dtensor_compile.topology.links import Cluster

#: Names by which they can be disabled.
LOWERED_PASSES: tuple[str, ...] = (
    "decompose_matmuls",
    "bucket_collectives",
    "reduce_by_exchange",
    "schedule_graph",
    "receive_before_sending",
)
#: Opt-in passes. `bucket_collectives` merges what the program groups by default. It merges more if the user asks for
#: it, names a topology, whose latency decides what pays, or runs on CPUs, on which starting takes long on any network.
LOWERED_OPTIONAL: tuple[str, ...] = ("decompose_matmuls", "bucket_collectives")


def decompose_matmuls(
    graph: torch.fx.Graph, topology: Cluster | None, overlap_memory: float, even: bool
) -> list[Decision]:
    """`dtensor_compile.schedule.decompose`, if decisions may depend on the seconds of compute.

    Args:
        topology: of the job; None for the default of the device.
        overlap_memory: allowed increase of the peak, as a fraction of it.
        even: whether all ranks have the same sizes.
    """
    cluster = cluster_for(graph, topology)
    if cluster is None:
        return []
    return decompose(graph, cluster, overlap_memory) if even else matmuls_left_whole(graph, cluster)


def bucket_collectives(graph: torch.fx.Graph, topology: Cluster | None, asked: bool) -> list[Decision]:
    """`dtensor_compile.schedule.bucket`: merges collectives that the program groups, and others if the user asks for it
    or if it pays.

    Args:
        topology: of the job; None for the default of the device.
        asked: whether the user asks for it.
    """
    cluster = cluster_for(graph, topology)
    if cluster is None:
        return []
    further = asked or topology is not None or cluster.backend == "gloo"
    left = left_out_of_buckets(graph, cluster, further=further)
    return [*bucket(graph, cluster, further=further), *left]


def kernels_in_order(before: Simulation, after: Simulation, least: float) -> Decision:
    """The decision with the predicted times of the kernels of a graph, in Inductor's order and in ours.

    Args:
        least: seconds that every order takes (`dtensor_compile.schedule.least_time`).
    """

    def text(found: Simulation) -> str:
        return f"{sum(found.exposed.values()) * 1e3:.2f} ms exposed"

    reason = (
        f"{len(after.exposed)} collectives; {before.seconds * 1e3:.2f} ms and {before.peak:,} bytes at most become "
        f"{after.seconds * 1e3:.2f} ms and {after.peak:,} bytes; no order takes less than {least * 1e3:.2f} ms"
    )
    return Decision("schedule_kernels", "", reason, text(before), text(after))
