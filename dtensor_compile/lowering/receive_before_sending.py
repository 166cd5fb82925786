"""On gloo, ranks that send to each other do so at the same time.

    before   s = all_to_all_single(x, [k, k], [k, k], group); y = wait(s)
    after    s = dtensor_compile.all_to_all_single(x, [k, k], [k, k], group); y = wait(s)

The same bytes, as messages for which each rank says first that it is ready to receive (`capture/messages.py`). gloo's own exchange and
its gathers between two ranks take turns instead, which costs up to twice the time on a network that carries both directions. With
more than two ranks gathers of gloo's go around a ring, where no connection is used both ways, and stay.

Messages cost the thread that computes what gloo's workers do, so that small collectives stay as well. Only what all ranks run alike
(`REDISTRIBUTES`), and where its sizes say the same to all of them: constants, cut evenly.
"""

from __future__ import annotations

import torch

from dtensor_compile.capture.messages import AS_MESSAGES, all_to_all
from dtensor_compile.compat.collectives import lower_as_collective
from dtensor_compile.decisions import Decision
from dtensor_compile.lowering.reduce_by_exchange import on_gloo
from dtensor_compile.passes.nodes import FUSED, REDISTRIBUTES, source_line
from dtensor_compile.report.graphs import collective_of

#: Bytes that a rank sends in a collective from which on messages pay.
LEAST = 1 << 16


def receive_before_sending(graph: torch.fx.Graph) -> list[Decision]:
    """Replaces the collectives of a lowered graph in which gloo's ranks would take turns; one decision for each kind."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in AS_MESSAGES and _pays(node):
            this = collective_of(node)
            text = f"{source_line(node)}\n{this.kind}"
            found[text] = found.get(text, 0) + this.bytes
            node.target = AS_MESSAGES[node.target]
            lower_as_collective(node.target)
    return [_decision(*text.split("\n"), size) for text, size in found.items()]


def _pays(node: torch.fx.Node) -> bool:
    values = [source.meta["val"] for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
    if REDISTRIBUTES not in node.meta or FUSED in node.meta or not values:
        return False
    if any(isinstance(size, torch.SymInt) for value in values for size in value.shape):
        return False
    if not all(value.dim() and on_gloo(node.args[-1], value) for value in values):  # type: ignore[arg-type]
        return False
    this = collective_of(node)
    even = len({*node.args[1], *node.args[2]}) == 1 if AS_MESSAGES[node.target] is all_to_all else len(this.ranks) == 2  # type: ignore[misc, index]
    return even and this.bytes >= LEAST


def _decision(where: str, kind: str, size: int) -> Decision:
    reason = f"{size:,} bytes: gloo sends before it says that it can receive, so that two ranks take turns"
    return Decision("receive_before_sending", where, reason, kind, f"{kind} by messages")
