"""Chooses the gathered tensors that are saved for the backward, and those that are gathered again there.

    kept              forward  g = gather(w); y = mm(x, g); return y, x, g     backward  gx = mm(t, g.T)
    gathered again    forward  g = gather(w); y = mm(x, g); return y, x, w     backward  g = gather(w); gx = mm(t, g.T)

In: the joint graph, and ``regather``: ``"always"``, ``"never"``, or the bytes of gathered tensors that one rank may
keep. Out: tags on the gathers that the backward needs, and a decision for each. If bytes are bounded, those that take
longest per byte to gather again are kept, and of equal ones the later, which the backward needs first and which are
held for the shortest time.

A gather is a redistribution of the forward from shards, without partial sums, to a larger local tensor. Views and casts
of its result are repeated with it, or they would be saved instead. All ranks make the same decision: it depends on
specs, global sizes and plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dtensor_compile.compat.aot.symbolic.shapes import size_hints
from dtensor_compile.compat.distributed.functional_collectives import (
    keep_for_backward,
    run_again_in_backward,
    traced_in_backward,
)
from dtensor_compile.compat.dtensor.specs import Partial
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import value_of
from dtensor_compile.graph.nodes import redistribution_of, redistributions, source_line
from dtensor_compile.graph.operator_traits import CASTS, is_view
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.ops.redistribute import plan_of
from dtensor_compile.planner.step_costs import local_elements

Regather = str | int


@dataclass(frozen=True, eq=False)
class _Gather:
    """A gather whose result the backward needs.

    Attributes:
        nodes: the redistribution, then the views and casts of it that the backward needs.
        bytes: bytes of the result, on the rank with the largest.
        seconds: estimated time of the gather.
    """

    nodes: tuple[torch.fx.Node, ...]
    bytes: int
    seconds: float


def regather(graph: torch.fx.Graph, wanted: Regather | None) -> list[Decision]:
    """Tags the gathers of a joint graph for the partitioner.

    Args:
        wanted: the option; None follows the program: gathers that a checkpointed region or FSDP's
            ``reshard_after_forward`` repeats are repeated, all others are kept.
    """
    if wanted is None:
        return []
    gathers = list(_gathers(graph))
    if isinstance(wanted, str):
        assert wanted in ("always", "never"), wanted
        kept = set(gathers) if wanted == "never" else set()
    else:
        kept = _within(gathers, wanted)
    decisions = []
    for gather in gathers:
        first = gather.nodes[0]
        if gather in kept:
            keep_for_backward(first)
        else:
            for node in gather.nodes:
                run_again_in_backward(node)
        reason = (
            f"{gather.bytes:,} bytes on each rank, {gather.seconds * 1e6:.0f} us to gather again; regather={wanted!r}"
        )
        after = "kept for backward" if gather in kept else "gathered again in backward"
        decisions.append(Decision("regather", source_line(first), reason, str(redistribution_of(first)), after))
    return decisions


def _within(gathers: list[_Gather], most: int) -> set[_Gather]:
    """The gathers to keep, at most `most` bytes in total."""
    kept, held = set(), 0
    latest_first = list(reversed(gathers))
    for gather in sorted(latest_first, key=lambda gather: -gather.seconds / max(1, gather.bytes)):
        if held + gather.bytes <= most:
            kept.add(gather)
            held += gather.bytes
    return kept


def _gathers(graph: torch.fx.Graph) -> Iterator[_Gather]:
    for node in redistributions(graph):
        if traced_in_backward(node) or "val" not in node.meta:
            continue
        this, itemsize = redistribution_of(node), value_of(node).element_size()
        layout, shape = parse_mesh(this.mesh), this.sizes
        source, target = parse_spec(this.source), parse_spec(this.target)
        steps = plan_of(this.source, this.target, layout, shape, itemsize)
        size, before = (local_elements(spec, layout.shape, size_hints(shape)) for spec in (target, source))
        if size <= before or any(isinstance(p, Partial) for p in source) or not any(step.sends for step in steps):
            continue
        repeated = _needed(node)
        if repeated:
            yield _Gather(tuple(repeated), size * itemsize, sum(step.seconds for step in steps))


def _needed(gather: torch.fx.Node) -> list[torch.fx.Node]:
    """`gather` and the views and casts of it whose results the backward needs; empty if it needs none."""
    needed: list[torch.fx.Node] = []

    def visit(node: torch.fx.Node) -> bool:
        found = any(traced_in_backward(user) for user in node.users)
        for user in node.users:
            light = is_view(user.target) or user.target in CASTS
            if light and not traced_in_backward(user) and visit(user):
                found = True
        if found:
            needed.append(node)
        return found

    visit(gather)
    return needed[::-1]
