"""What stages leave alone in a graph, as decisions with what that costs at most.

In: a joint graph, or a lowered one with the cluster for which it is planned. Out: decisions; the graph stays as it is. Stages whose
reason is at hand where they decide say it themselves.

Seconds are those of the collectives concerned, as if nothing computed while they run: of a stage that did not run nothing better is
known. Nothing here decides anything, so that ranks may see other seconds.
"""

from __future__ import annotations

import torch

from dtensor_compile.capture.trace import HANDED_BACK
from dtensor_compile.decisions import Decision
from dtensor_compile.lowering.schedule_graph import cluster_for, cost_of
from dtensor_compile.passes.nodes import is_start, source_line
from dtensor_compile.report.graphs import collective_of
from dtensor_compile.topology.links import Cluster


def handed_back(graph: torch.fx.Graph) -> list[Decision]:
    """A decision for each redistribution of a joint graph that torch's own code traced instead of the operator."""
    costs: dict[tuple[str, str, int], int] = {}
    for node in graph.nodes:
        if (back := node.meta.get(HANDED_BACK)) is not None:
            key = source_line(node), back.reason, back.number
            costs[key] = costs.get(key, 0) + (collective_of(node).bytes if is_start(node) else 0)
    return [
        Decision("capture", where, f"torch redistributes it, and no pass sees it: {reason}", left_alone=True, bytes=sent)
        for (where, reason, _), sent in costs.items()
    ]


def communication_seconds(graph: torch.fx.Graph, topology: Cluster | None) -> float:
    """Estimated seconds of all collectives of a lowered graph, one after the other.

    Args:
        topology: None for the default of the device.
    """
    cluster = cluster_for(graph, topology)
    return 0.0 if cluster is None else sum(cost_of(cluster, collective_of(node))[1] for node in graph.nodes if is_start(node))
