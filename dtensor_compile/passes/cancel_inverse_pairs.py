"""A redistribution that undoes the one before it goes away; so does one that changes nothing.

    redistribute(x, A -> A)                        =  x
    redistribute(redistribute(x, A -> B), B -> A)  =  x

Right because a spec determines the local tensor of every rank from the global one where neither spec is partial: both sides are
the local tensor of the same global tensor in spec A. Partial specs are left alone: their local tensors are not determined, and
R -> P(sum) -> R divides and adds again, which may round.

It pays always: nothing is sent in its place.

    before   a = redistribute(x, S(0) -> R); b = redistribute(a, R -> S(0)); y = relu(b)
    after    y = relu(x)                       (and the gather goes away too, unless something else reads it)
"""

from __future__ import annotations

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.passes.nodes import is_redistribution, read, redistributions, source_line


def cancel_inverse_pairs(graph: torch.fx.Graph) -> list[Decision]:
    """Cancels identity and inverse redistributions in `graph`."""
    decisions = []
    for node in redistributions(graph):
        this = read(node)
        if "P(" in this.source + this.target:
            continue
        if this.source == this.target:
            original, before = this.local, str(this)
        else:
            if not is_redistribution(this.local):
                continue
            previous = read(this.local)
            if (previous.source, previous.target) != (this.target, this.source):
                continue
            if (previous.mesh, previous.shape) != (this.mesh, this.shape):
                continue
            original, before = previous.local, f"{previous}->{this.target}"
        node.replace_all_uses_with(_with_strides_of(node, original))
        graph.erase_node(node)
        if this.local is not original and not this.local.users:
            graph.erase_node(this.local)
        decisions.append(Decision("cancel_inverse_pairs", source_line(node), "the result is the tensor that was there before", before, "nothing"))
    return decisions


def _with_strides_of(node: torch.fx.Node, original: torch.fx.Node) -> torch.fx.Node:
    """`original`, laid out like the result of `node`: what follows was traced for those strides."""
    was, now = node.meta.get("val"), original.meta.get("val")
    if was is None or now is None or was.stride() == now.stride():
        return original
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(
            torch.ops.aten.clone.default, (original,), {"memory_format": torch.contiguous_format}
        )
    copy.meta = {**node.meta}
    return copy
