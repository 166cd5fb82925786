"""Orders a lowered graph by `dtensor_compile.schedule.list_scheduler`.

In: a forward or backward graph of functional collectives, and a cluster. Out: the same nodes in another order, and a
decision for each collective: hidden, or exposed and why.

    before   s = all_gather(w); g = wait(s); y = mm(x, g); t = all_gather(v); h = wait(t); z = mm(y, h)
    after    s = all_gather(w); t = all_gather(v); g = wait(s); y = mm(x, g); h = wait(t); z = mm(y, h)

Dependencies besides arguments: nodes that draw random numbers keep their order; a fixed node (`is_fixed`) follows all
nodes before it and precedes all after it; and in a graph with collectives of the program itself, a wait stays behind
the starts that it follows, because ranks that run different programs could otherwise deadlock.

Inductor reorders its kernels afterwards. `schedule/kernel_order.py` orders those again by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dtensor_compile.compat.aot.fx import CALL, called_graph
from dtensor_compile.compat.aot.random_state import node_draws
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import operator_of, value_of
from dtensor_compile.graph.measured_kernels import measured_seconds
from dtensor_compile.graph.node_costs import SentCollective, collective_of, result_bytes, work_of
from dtensor_compile.graph.nodes import ACROSS, is_fixed, is_start, is_wait, starts_collective
from dtensor_compile.graph.operator_traits import is_view
from dtensor_compile.ops.groups import GROUP, REDISTRIBUTES
from dtensor_compile.schedule.list_scheduler import arrange, excess
from dtensor_compile.schedule.simulated_device import Buffer, Simulation, Task, simulate
from dtensor_compile.schedule.start_order import hoist_gathers
from dtensor_compile.schedule.wrapper_order import wrapper_peak
from dtensor_compile.topology.backends import host_seconds
from dtensor_compile.topology.devices import default_cluster
from dtensor_compile.topology.links import Cluster, compute_seconds, seconds_in_turn

#: Kind of the decisions about an order.
ORDERED = "schedule"
#: Kind of the decision about an order that holds more than ``overlap_memory`` allows.
OVER_BOUND = "overlap_memory"


def schedule_graph(
    graph: torch.fx.Graph, topology: Cluster | None, overlap_memory: float, measured: bool = False
) -> list[Decision]:
    """Orders `graph` so that collectives overlap with compute.

    Args:
        topology: topology for which seconds are estimated; None for the default of the device. Seconds decide what runs
            between two starts, never the order of starts.
        overlap_memory: allowed increase of the peak, as a fraction of the peak of the given graph; the peak of
            ``fully_shard``'s own order is always allowed.
        measured: as for `graph_tasks`.
    """
    cluster = cluster_for(graph, topology)
    if cluster is None:
        return []
    tasks = graph_tasks(graph, cluster, measured)
    before = simulate(tasks, range(len(tasks)))
    wrapped = {i: reduces for i, node in enumerate(graph.nodes) if (reduces := is_wrapped(node)) is not None}
    bound = max(excess(overlap_memory, before.peak), wrapper_peak(tasks, wrapped))
    between_meshes = any(ACROSS in node.meta for node in graph.nodes)  # then ranks of a mesh do not all have this graph
    if not between_meshes and hoist_gathers(graph):
        tasks = graph_tasks(graph, cluster, measured)
    order = arrange(tasks, bound)
    nodes = list(graph.nodes)
    output = nodes[-1]
    for index in order:
        if nodes[index].op not in ("placeholder", "output"):
            output.prepend(nodes[index])
    found = simulate(tasks, order)
    decisions = explain(
        tasks, order, found, {index: collective_of(node) for index, node in enumerate(nodes) if is_start(node)}
    )
    return [*decisions, *_over(found.peak, bound, before.peak, overlap_memory)]


def graph_seconds(graph: torch.fx.Graph, cluster: Cluster) -> float:
    """Estimated seconds of a lowered graph in its order: of compute, with what it loses to collectives beside it, and
    of what is exposed of these."""
    tasks = graph_tasks(graph, cluster)
    found = simulate(tasks, range(len(tasks)))
    hidden = sum(task.seconds for task in tasks if task.link is not None) - sum(found.exposed.values())
    return found.seconds + cluster.device.contention * max(0.0, hidden)


def costs_alike(graph: torch.fx.Graph, cluster: Cluster) -> bool:
    """Whether the collectives of a lowered graph cost the same on every rank, whose groups are other ones."""
    sent = [collective_of(node) for node in graph.nodes if is_start(node)]
    return all(this.mesh_dim in cluster.mesh_dims or cluster.is_alike(this.ranks) for this in sent)


def _over(peak: int, bound: float, before: int, overlap_memory: float) -> list[Decision]:
    """A decision about the excess of an order over its bound, if any.

    That happens if gathers start earlier than in the program (`hoist_gathers`), and no order of the same starts holds
    less. Ranks keep the order of starts, since each of them knows only the memory of its own shards.
    """
    if peak <= bound:
        return []
    reason = (
        f"no order of these starts that was found keeps overlap_memory={overlap_memory:g}: {peak - bound:,.0f} bytes "
        f"more than the bound of {bound:,.0f}; gathers start earlier than in the program"
    )
    return [Decision(OVER_BOUND, "", reason, f"{before:,} bytes", f"{peak:,} bytes")]


def is_wrapped(node: torch.fx.Node | None) -> bool | None:
    """Whether a start reduces for a wrapper of the program (gathers for it: False); None for other nodes."""
    if node is None or GROUP not in node.meta or not starts_collective(node):
        return None
    return "reduce" in operator_of(node)._schema.name


class Sending(NamedTuple):
    """The link that carries a collective, the seconds that it takes, and those behind another one (`Task.behind`)."""

    link: str
    seconds: float
    behind: float


def cost_of(cluster: Cluster, this: SentCollective) -> Sending:
    """What a collective takes of which link.

    Groups of all mesh dims share the link to other hosts, since a rank has only one; a mesh dim whose link the topology
    names has its own.
    """
    named = cluster.mesh_dims.get(this.mesh_dim)
    if named is not None:
        name, link = this.mesh_dim, named.share(len(this.ranks))
    else:
        hosts = {rank // cluster.ranks_per_host for rank in this.ranks} if cluster.ranks_per_host else set()
        name, link = "between hosts" if len(hosts) > 1 else "inside a host", cluster.link(this.ranks)
    return Sending(name, *seconds_in_turn(link, cluster.backend, this.kind, this.bytes, len(this.ranks)))


def cluster_for(graph: torch.fx.Graph, topology: Cluster | None) -> Cluster | None:
    """The cluster for which seconds of a graph are estimated; None for a graph that waits for no collective."""
    first = next((node for node in graph.nodes if is_wait(node)), None)
    return None if first is None else topology or default_cluster(value_of(first).device.type)


def graph_tasks(
    graph: torch.fx.Graph, cluster: Cluster, measured: bool = False, *, holds_inputs: bool = False
) -> list[Task]:
    """The nodes of a graph as tasks, one each, in order.

    Args:
        measured: whether operators are measured if possible (`measured_seconds`); seconds then differ between ranks.
        holds_inputs: whether the caller holds all inputs meanwhile.
    """
    nodes = list(graph.nodes)
    number = {node: index for index, node in enumerate(nodes)}
    own_sends = any(is_start(node) and REDISTRIBUTES not in node.meta for node in nodes)
    roots, memory = _memory(nodes, holds_inputs)
    started: dict[torch.fx.Node, torch.fx.Node] = {}
    computed: set[torch.fx.Node] = set()
    fixed, random, start = -1, -1, -1
    tasks: list[Task] = []
    for index, node in enumerate(nodes):
        after = [number[source] for source in node.all_input_nodes]
        reads = dict.fromkeys(memory[roots[source]] for source in node.all_input_nodes)
        makes = (memory[node],) if node in memory else ()
        if node.op in ("placeholder", "get_attr"):
            tasks.append(Task(makes=makes, given=True))
            continue
        if fixed >= 0:
            after.append(fixed)
        if node.op == "output" or is_fixed(node):
            after.extend(range(fixed + 1, index))
            fixed = index
        if node_draws(node):
            after += [random] if random >= 0 else []
            random = index
        link, waits_for, seconds, host, inside, behind = None, None, 0.0, 0.0, 0, None
        if is_start(node):
            (link, seconds, behind), host = cost_of(cluster, collective_of(node)), host_seconds(cluster.backend)
            started[node] = node
            after += [start] if start >= 0 else []
            start = index
        elif node.all_input_nodes and node.all_input_nodes[0] in started:
            started[node] = started[node.all_input_nodes[0]]
            if is_wait(node):
                waits_for = number[started[node]]
                reads.update(dict.fromkeys(tasks[waits_for].reads))
                after += [start] if own_sends else []
                del started[node]
        elif node.target is CALL:
            seconds, inside = cost_of_block(called_graph(node), cluster, measured)
        else:
            seconds = _seconds(node, computed, cluster, measured)
        follows = tuple(dict.fromkeys(after))
        tasks.append(
            Task(seconds, follows, link, waits_for, makes, tuple(reads), host=host, inside=inside, behind=behind)
        )
    return tasks


def _seconds(node: torch.fx.Node, computed: set[torch.fx.Node], cluster: Cluster, measured: bool) -> float:
    """Seconds of a node that does not communicate itself; `computed` is as in `work_of`."""
    work = work_of(node, computed)
    if work is None:
        return 0.0
    known = measured_seconds(node) if measured else None
    return compute_seconds(cluster.device, *work) if known is None else known


class BlockCost(NamedTuple):
    """The cost of one call of a block.

    Attributes:
        seconds: in its order, collectives that it waits for included.
        inside: bytes that it holds at most beside its inputs, which its caller holds, and its results.
    """

    seconds: float
    inside: int


def cost_of_block(block: torch.fx.GraphModule, cluster: Cluster, measured: bool = False) -> BlockCost:
    """The cost of one call of the graph of a block."""
    known: dict[Any, BlockCost] = block.meta.setdefault("dtensor_compile_cost", {})
    key = str(cluster), measured, len(block.graph.nodes)
    if key not in known:
        tasks = graph_tasks(block.graph, cluster, measured, holds_inputs=True)
        found = simulate(tasks, range(len(tasks)))
        outside = sum(task.bytes for task in tasks if task.given) + sum(result.bytes for result in tasks[-1].reads)
        known[key] = BlockCost(found.seconds, max(0, found.peak - outside))
    return known[key]


def _memory(
    nodes: Sequence[torch.fx.Node], holds_inputs: bool
) -> tuple[dict[torch.fx.Node, torch.fx.Node], dict[torch.fx.Node, Buffer]]:
    """For each node of a graph the node that owns its memory, and the buffers of the owners."""
    roots: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes:
        roots[node] = roots[node.all_input_nodes[0]] if _aliases(node) else node
    kept = {roots[source] for source in nodes[-1].all_input_nodes}
    kept.update(
        node
        for node in nodes
        if node.op == "get_attr" or node.op == "placeholder" and (holds_inputs or _is_parameter(node))
    )
    return roots, {
        node: Buffer(size := result_bytes(node), size, node in kept) for node in nodes if roots[node] is node
    }


def _is_parameter(node: torch.fx.Node) -> bool:
    """Whether a node is an input that the caller holds anyway. Tensors saved for the backward are freed as they are
    used.
    """
    return str(node.target).startswith(("primals", "arg"))


def _aliases(node: torch.fx.Node) -> bool:
    """Whether the result of a node lies in the memory of its first argument."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    return is_wait(node) or is_view(node.target) or is_start(node.all_input_nodes[0])


def explain(
    tasks: Sequence[Task], order: Sequence[int], found: Simulation, collectives: Mapping[int, SentCollective]
) -> list[Decision]:
    """A decision for each collective of an order: hidden, or exposed and why.

    Args:
        found: the simulation of `order`.
        collectives: the records of the starts among `tasks`; those without one are left out.
    """
    place = {index: at for at, index in enumerate(order)}
    first_wait: dict[int, int] = {}
    for at, index in enumerate(order):
        if (start := tasks[index].waits_for) is not None:
            first_wait.setdefault(start, at)
    computes = [at for at, index in enumerate(order) if tasks[index].seconds and tasks[index].link is None]
    decisions = []
    for index, exposed in found.exposed.items():
        this, seconds = collectives.get(index), tasks[index].seconds
        if this is None:
            continue
        start, wait = place[index], first_wait.get(index, len(order))
        beside = any(start < at < wait for at in computes)
        if exposed > 0:
            reason = f"{exposed * 1e3:.2f} of {seconds * 1e3:.2f} ms exposed: {_why(start, wait, computes)}"
        elif beside:
            reason = f"hidden: {seconds * 1e3:.2f} ms beside compute"
        else:
            reason = (
                f"{seconds * 1e3:.2f} ms, over while others are waited for; nothing is computed between its start "
                "and its wait"
            )
        text = f"{this.kind}[{this.mesh_dim}]"
        decisions.append(Decision(ORDERED, this.where, reason, text, text))
    return decisions


def _why(start: int, wait: int, computes: Sequence[int]) -> str:
    """The reason why a collective with this start and wait is exposed."""
    if not computes or start < computes[0]:
        return "it starts with the graph, and the first compute needs it"
    if wait > computes[-1]:
        return "nothing is left to compute when it starts"
    return "what it sends is ready too late before its first use, and all else depends on it or has run"
