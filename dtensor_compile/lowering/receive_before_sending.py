"""Lets gloo ranks that send to each other do so at the same time.

    before   s = all_to_all_single(x, [k, k], [k, k], group); y = wait(s)
    after    s = dtensor_compile.all_to_all_single(x, [k, k], [k, k], group); y = wait(s)

The same bytes are sent as messages, for which each rank first reports that it is ready to receive (`ops/messages.py`).
gloo's own exchange and its gathers between two ranks take turns instead, which costs up to twice the time on a network
that carries both directions.

    exchanges    always: with 2 and 4 ranks, 16 KiB to 8 MiB to each, at 1 Gbit/s they took 0.32 to 1.02 of gloo's time
    gathers      of two ranks, from `LEAST` on, below which messages cost the compute thread more than they
                 save. gloo's gathers of more ranks go around a ring, in which no connection is used both ways but each
                 rank waits for the one before it: they become messages if the user names a topology that has no
                 link between hosts twice on the way, one rank a host or one host (4 ranks: 0.17 to 0.91 of gloo's
                 time)

Only rank-uniform collectives (`REDISTRIBUTES`) change; decisions follow from the kind, the ranks, and the sizes of
gathers, which are equal on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor_compile.compat.distributed.functional_collectives import lower_as_collective
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import const_arg, operator_of
from dtensor_compile.graph.node_costs import collective_of
from dtensor_compile.graph.nodes import FUSED
from dtensor_compile.lowering.reduce_by_exchange import on_gloo
from dtensor_compile.ops.groups import REDISTRIBUTES
from dtensor_compile.ops.messages import AS_MESSAGES, all_to_all
from dtensor_compile.topology.links import Cluster

#: Minimum bytes that a rank sends in a gather for messages to pay.
LEAST = 1 << 15


def receive_before_sending(graph: torch.fx.Graph, topology: Cluster | None = None) -> list[Decision]:
    """Replaces the collectives of a lowered graph in which gloo's ranks would take turns; returns a decision for each
    line and kind.

    Args:
        topology: of the job, where the user names it.
    """
    found: dict[tuple[str, str], int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in AS_MESSAGES and _pays(node, topology):
            this = collective_of(node)
            found[this.where, this.kind] = found.get((this.where, this.kind), 0) + this.bytes
            by_messages = AS_MESSAGES[operator_of(node)]
            node.target = by_messages
            lower_as_collective(by_messages)
    return [_decision(where, kind, size) for (where, kind), size in found.items()]


def _pays(node: torch.fx.Node, topology: Cluster | None) -> bool:
    values = [source.meta["val"] for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
    if REDISTRIBUTES not in node.meta or FUSED in node.meta:
        return False
    if not all(value.dim() and on_gloo(const_arg(node, -1, str), value) for value in values):
        return False
    if AS_MESSAGES[operator_of(node)] is all_to_all:
        return True
    if any(isinstance(size, torch.SymInt) for value in values for size in value.shape):
        return False
    this = collective_of(node)
    return this.bytes >= LEAST and (
        len(this.ranks) == 2 or topology is not None and _has_own_links(this.ranks, topology)
    )


def _has_own_links(ranks: Sequence[int], topology: Cluster) -> bool:
    """Whether no two of several ranks share a host's link to others of them."""
    hosts = {rank // topology.ranks_per_host for rank in ranks} if topology.ranks_per_host else {0}
    return len(hosts) in (1, len(ranks))


def _decision(where: str, kind: str, size: int) -> Decision:
    reason = f"{size:,} bytes: gloo sends before it says that it can receive, so that two ranks take turns"
    return Decision("receive_before_sending", where, reason, kind, f"{kind} by messages")
