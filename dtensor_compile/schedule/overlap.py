"""Passes over a lowered graph, in the order in which they run: products in parts, the form of each collective, how many of them, the
order of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.schedule.bucket import bucket_collectives as bucket
from dtensor_compile.schedule.decompose import decompose_products as decompose
from dtensor_compile.schedule.left_alone import left_out_of_buckets, products_left_whole
from dtensor_compile.lowering.receive_before_sending import receive_before_sending
from dtensor_compile.lowering.reduce_by_exchange import reduce_by_exchange
from dtensor_compile.schedule.list_scheduler import Simulation
from dtensor_compile.schedule.schedule_graph import cluster_for, schedule_graph
from dtensor_compile.passes import Pass
from dtensor_compile.topology.links import Cluster

#: Names under which they can be left out.
LOWERED_PASSES: tuple[str, ...] = ("decompose_products", "bucket_collectives", "reduce_by_exchange", "schedule_graph", "receive_before_sending")
#: Those that run only where the user asks for them. `bucket_collectives` merges what the program groups by default, and more than that
#: where the user asks for it, names a topology, whose latency says what pays, or runs on CPUs, where starting takes long on any network.
LOWERED_OPTIONAL: tuple[str, ...] = ("decompose_products", "bucket_collectives")


def passes_after_lowering(
    topology: Cluster | None, overlap_memory: float, enabled: Sequence[str] = (), *, even: Callable[[], bool] = lambda: False,
    measured: bool = False,
) -> tuple[Pass, ...]:
    """The passes, for `run_passes`.

    Args:
        topology: of the job; None for the default of the device.
        overlap_memory: part of the peak that the order may add.
        enabled: names of `LOWERED_OPTIONAL` ones that the user asks for.
        even: asked when they run: whether all ranks have the same sizes, so that they may decide by the seconds of compute.
        measured: kernels are measured for the order.
    """

    def decompose_products(graph: torch.fx.Graph) -> list[Decision]:
        cluster = cluster_for(graph, topology)
        if cluster is None:
            return []
        return decompose(graph, cluster, overlap_memory) if even() else products_left_whole(graph, cluster)

    def bucket_collectives(graph: torch.fx.Graph) -> list[Decision]:
        cluster = cluster_for(graph, topology)
        if cluster is None:
            return []
        further = bucket_collectives.__name__ in enabled or topology is not None or cluster.backend == "gloo"
        left = left_out_of_buckets(graph, cluster, further=further)
        return [*bucket(graph, cluster, further=further), *left]

    def in_order(graph: torch.fx.Graph) -> list[Decision]:
        return schedule_graph(graph, topology, overlap_memory, measured)

    def in_both_directions(graph: torch.fx.Graph) -> list[Decision]:
        return receive_before_sending(graph, topology)

    in_order.__name__, in_both_directions.__name__ = schedule_graph.__name__, receive_before_sending.__name__
    passes = (decompose_products, bucket_collectives, reduce_by_exchange, in_order, in_both_directions)
    return tuple(run for run in passes if run is not decompose_products or run.__name__ in enabled)


def kernels_in_order(before: Simulation, after: Simulation, least: float) -> Decision:
    """What is predicted for the kernels of a graph, in Inductor's order and in ours.

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
