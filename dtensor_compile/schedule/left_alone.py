"""Decisions about nodes of a graph that stages leave alone, with the maximum cost of that.

In: a joint graph, or a lowered one with the cluster for which it is planned. Out: decisions; the graph stays as it is.
Stages that know the reason when they decide report it themselves.

Seconds are those of the collectives concerned without any overlap: no better estimate exists for a stage that did not
run. They are for reports only, so that they may differ between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.measured_kernels import not_measured
from dtensor_compile.graph.node_costs import collective_of
from dtensor_compile.graph.nodes import FUSED, HANDED_BACK, PART, communicates, is_fixed, is_start, source_line
from dtensor_compile.ops.groups import GROUP, REDISTRIBUTES
from dtensor_compile.schedule.bucket import COALESCED
from dtensor_compile.schedule.decompose import pairs
from dtensor_compile.schedule.list_scheduler import TIME_TOLERANCE, arrange
from dtensor_compile.schedule.schedule_graph import ORDERED, cluster_for, cost_of, graph_tasks
from dtensor_compile.schedule.simulated_device import simulate
from dtensor_compile.topology.links import Cluster, startup_seconds

if TYPE_CHECKING:
    from dtensor_compile.schedule.found_order import KernelOrder


def handed_back(graph: torch.fx.Graph) -> list[Decision]:
    """A decision for each redistribution of a joint graph that torch's own code traced instead of the operator."""
    costs: dict[tuple[str, str, int], int] = {}
    for node in graph.nodes:
        if (back := node.meta.get(HANDED_BACK)) is not None:
            key = source_line(node), back.reason, back.number
            costs[key] = costs.get(key, 0) + (collective_of(node).bytes if is_start(node) else 0)
    return [
        Decision(
            "capture", where, f"torch redistributes it, and no pass sees it: {reason}", left_alone=True, bytes=sent
        )
        for (where, reason, _), sent in costs.items()
    ]


def communication_seconds(graph: torch.fx.Graph, topology: Cluster | None) -> float:
    """Estimated seconds of all collectives of a lowered graph, without overlap.

    Args:
        topology: None for the default of the device.
    """
    cluster = cluster_for(graph, topology)
    return (
        0.0
        if cluster is None
        else sum(cost_of(cluster, collective_of(node)).seconds for node in graph.nodes if is_start(node))
    )


def matmuls_left_whole(graph: torch.fx.Graph, cluster: Cluster) -> list[Decision]:
    """The decision that matmuls beside collectives are not decomposed, because seconds of compute differ between
    ranks.
    """
    found = [pair.start for pair in pairs(graph) if not pair.why_not]
    if not found:
        return []
    seconds = sum(cost_of(cluster, collective_of(start)).seconds for start in found)
    reason = "shards are uneven or of symbolic sizes: estimates of compute differ between ranks, and so would decisions"
    text = f"{len(found)} matmuls beside collectives"
    return [Decision("decompose_matmuls", source_line(found[0]), reason, text, text, left_alone=True, seconds=seconds)]


def left_out_of_buckets(graph: torch.fx.Graph, cluster: Cluster, *, further: bool) -> list[Decision]:
    """Decisions about similar collectives that are not merged: those of symbolic sizes, and those of one group of the
    program with a node between them that no bucket reaches across. The cost is that of starting them one by one.

    Args:
        graph: the graph before `bucket_collectives`.
        further: as there.
    """
    stretch = 0
    symbolic: dict[Hashable, list[torch.fx.Node]] = {}
    fixed: dict[Hashable, int] = {}
    groups: dict[Hashable, dict[int, torch.fx.Node]] = {}
    for node in graph.nodes:
        own = is_start(node) and REDISTRIBUTES not in node.meta
        stretch += is_fixed(node) or own
        if own or not is_start(node) or node.target not in COALESCED or {PART, FUSED} & node.meta.keys():
            continue
        value, group = node.meta["val"], node.meta.get(GROUP)
        kind = node.target, node.args[1:], value.dtype, value.device
        key: Hashable = (*kind, None if further else group)
        if not further and group is None:
            continue
        if any(isinstance(size, torch.SymInt) for size in value.shape):
            symbolic.setdefault(key, []).append(node)
        else:
            fixed[key] = fixed.get(key, 0) + 1
            if group is not None:
                groups.setdefault((*kind, group), {}).setdefault(stretch, node)
    decisions = []
    for key, nodes in symbolic.items():
        more = len(nodes) - (key not in fixed)
        decisions += _not_merged(nodes[0], len(nodes), more, "their sizes are symbolic", cluster)
    for stretches in groups.values():
        nodes = list(stretches.values())
        reason = (
            "the program groups them, and a write to memory or a collective of the program itself stands between them"
        )
        decisions += _not_merged(nodes[0], len(nodes), len(nodes) - 1, reason, cluster)
    return decisions


def _not_merged(first: torch.fx.Node, number: int, more: int, reason: str, cluster: Cluster) -> list[Decision]:
    """The decision about `number` buckets or collectives, `more` of which merging would save."""
    if not more:
        return []
    about = collective_of(first)
    seconds = more * startup_seconds(cluster, about.kind, about.ranks)
    text = f"{number} {about.kind}"
    return [
        Decision(
            "bucket_collectives", about.where, f"not merged: {reason}", text, text, left_alone=True, seconds=seconds
        )
    ]


def order_left(graph: torch.fx.Graph, topology: Cluster | None, *, scheduled: bool) -> list[Decision]:
    """Decisions about a lowered graph in its final order: nodes that keep their place in the program.

    Args:
        scheduled: whether `schedule_graph` ran.
    """
    cluster = cluster_for(graph, topology)
    if cluster is None:
        return []
    nodes, tasks = list(graph.nodes), graph_tasks(graph, cluster)
    exposed = simulate(tasks, range(len(tasks))).exposed
    if not scheduled:
        return [_unscheduled(len(exposed), sum(exposed.values()))]
    own = [index for index in exposed if REDISTRIBUTES not in nodes[index].meta]
    synchronous = [node for node in nodes if is_fixed(node) and communicates(node.target)]
    where = source_line(nodes[own[0]]) if own else source_line(synchronous[0]) if synchronous else ""
    return _kept_in_order(ORDERED, where, len(own), sum(exposed[index] for index in own), len(synchronous))


def kernels_left(found: KernelOrder) -> list[Decision]:
    """As `order_left`, for the kernels of a graph."""
    own = [index for index in found.own if index in found.starts]
    where = found.starts[own[0]].where if own else ""
    decisions = _kept_in_order(
        "schedule_kernels", where, len(found.own), sum(found.after.exposed[index] for index in own), found.synchronous
    )
    if found.unknown:
        reason = (
            f"{found.unknown} kernels start or wait for a collective whose node of the graph is not known: "
            "nothing moves past such a wait"
        )
        decisions.append(Decision("schedule_kernels", "", reason, left_alone=True))
    return decisions + _bound_by_memory(found)


def _bound_by_memory(found: KernelOrder) -> list[Decision]:
    """The decision that a faster order of kernels needs more memory than `overlap_memory` allows."""
    if not sum(found.after.exposed.values()):
        return []
    unbound = simulate(found.tasks, arrange(found.tasks, math.inf))
    saved = found.after.seconds - unbound.seconds
    if saved <= TIME_TOLERANCE * found.after.seconds or unbound.peak <= found.after.peak:
        return []
    stays = (
        "Inductor's order stays"
        if found.order == list(range(len(found.order)))
        else "the order keeps to a bound on memory"
    )
    reason = (
        f"{stays}: a faster one has a peak of {unbound.peak:,} bytes and not {found.after.peak:,} (`overlap_memory`)"
    )
    return [Decision("schedule_kernels", "", reason, left_alone=True, seconds=saved)]


def unordered_kernels() -> Decision:
    """The decision that this torch has no hooks for reordering kernels."""
    reason = "this release of torch has no hooks for an order of kernels: Inductor's order stays"
    return Decision("schedule_kernels", "", reason, left_alone=True)


def estimated_kernels() -> list[Decision]:
    """The decision that ``kernel_costs="measured"`` falls back to estimates for operators that do not run here."""
    left = not_measured()
    reason = f"{len(left)} operators cannot be measured on this machine, and are estimated: {'; '.join(left)[:200]}"
    return [Decision("kernel_costs", "", reason, "measured", "estimated", left_alone=True)] if left else []


def _unscheduled(number: int, seconds: float) -> Decision:
    reason = (
        f"options={{'schedule': False}}: {number} collectives start and are waited for where the program has "
        "them, and none are merged"
    )
    return Decision(ORDERED, "", reason, left_alone=True, seconds=seconds)


def _kept_in_order(kind: str, where: str, own: int, seconds: float, synchronous: int) -> list[Decision]:
    decisions = []
    if own:
        reason = (
            f"{own} collectives are the program's own, or between meshes, and other ranks may run another program: all "
            "collectives start in the order of the program, and waits stay behind the starts before them"
        )
        decisions.append(Decision(kind, where, reason, left_alone=True, seconds=seconds))
    if synchronous:
        reason = f"{synchronous} operators communicate synchronously: nothing moves past them"
        decisions.append(Decision(kind, where, reason, left_alone=True))
    return decisions
