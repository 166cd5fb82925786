"""Removes a redistribution that undoes the one before it, and one that changes nothing.

    redistribute(x, A -> A)                        =  x
    redistribute(redistribute(x, A -> B), B -> A)  =  x

Correct because a spec that is not partial determines the local tensor of every rank from the global one: both sides are
the local tensor of the same global tensor in spec A. Partial specs are left alone: their local tensors are not
determined, and R -> P(sum) -> R divides and adds again, which may round.

It always pays: nothing is sent in its place.

    before   a = redistribute(x, S(0) -> R); b = redistribute(a, R -> S(0)); y = relu(b)
    after    y = relu(clone(x))                (and the gather is removed too, unless something else reads it)
"""

from __future__ import annotations

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.copies import behind_copies, can_copy, replace_by_copy
from dtensor_compile.graph.nodes import is_redistribution, redistribution_of, redistributions, source_line


def cancel_inverse_pairs(graph: torch.fx.Graph) -> list[Decision]:
    """Cancels identity and inverse redistributions in `graph`."""
    decisions = []
    for node in redistributions(graph):
        this = redistribution_of(node)
        if "P(" in this.source + this.target:
            continue
        if this.source == this.target:
            original, before = this.local, str(this)
        else:
            inner = behind_copies(this.local)
            if not is_redistribution(inner):
                continue
            previous = redistribution_of(inner)
            if (previous.source, previous.target) != (this.target, this.source):
                continue
            if (previous.mesh, previous.shape) != (this.mesh, this.shape):
                continue
            original, before = previous.local, f"{previous}->{this.target}"
        if not can_copy(original, node):
            continue
        reason = "the result is the tensor that was there before"
        decisions.append(Decision("cancel_inverse_pairs", source_line(node), reason, before, "nothing"))
        replace_by_copy(node, original)
    return decisions
