"""Facts about nodes that are rank-uniform: the same on all ranks.

Every rank runs the passes on its own graph and must make the same decisions, or ranks would call different collectives.
If all shards are even, ranks see the same sizes. If some are not, a size of 1 on one rank looks like a broadcast, and a
view like a no-op; a pass then uses marks (``graph/global_annotations.py``), and leaves nodes without one alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from dtensor_compile.graph.arguments import value_of
from dtensor_compile.graph.global_annotations import MARK, Mark
from dtensor_compile.graph.nodes import is_redistribution, redistribution_of
from dtensor_compile.graph.operator_traits import IDENTITIES, SIZES_FOLLOW, SUMS, is_pointwise
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.planner.shard_intervals import cuts_evenly

_uneven: ContextVar[bool] = ContextVar("uneven", default=False)


@contextlib.contextmanager
def sizes_differ(differ: bool) -> Iterator[None]:
    """While active, sizes of local tensors are taken to differ between ranks, or not to differ."""
    token = _uneven.set(differ)
    try:
        yield
    finally:
        _uneven.reset(token)


def may_use_sizes() -> bool:
    """Whether decisions may depend on the sizes of local tensors: all ranks have the same."""
    return not _uneven.get()


def nodes_of_equal_sizes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes of `graph` whose local tensors have the same sizes on every rank: all, or if shards are uneven, those
    whose mark says so and those computed from such nodes alone.
    """
    if may_use_sizes():
        return set(graph.nodes)
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        mark = mark_of(node)
        if mark is not None:
            even = cuts_evenly(parse_spec(mark.spec), parse_mesh(mark.mesh).shape, mark.shape)
        else:
            follows = node.target in SIZES_FOLLOW or is_pointwise(node.target)
            even = follows and bool(node.all_input_nodes) and found.issuperset(node.all_input_nodes)
        if even:
            found.add(node)
    return found


def equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether sizes or strides are equal for all values of their symbols; asks for no guard."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b))


def mark_of(node: Any) -> Mark | None:
    """The global form of a node; None if unknown."""
    if is_redistribution(node):
        this = redistribution_of(node)
        return Mark(this.target, this.mesh, this.shape) if all(type(size) is int for size in this.shape) else None
    return node.meta.get(MARK) if isinstance(node, torch.fx.Node) else None


def spread_marks(graph: torch.fx.Graph) -> None:
    """Marks nodes that are computed like a marked node: by the same operators from arguments with the same marks.

    Tracing marks the arguments of an operator the first time only (`compat.aot.dtensor_observer`); later layers of a
    model repeat the first. Sums and copies of marked nodes are marked too: a program may add local tensors of DTensors.
    """
    made: dict[str, Mark | None] = {}
    names: dict[torch.fx.Node, str] = {}
    numbers: dict[Mark | str, int] = {}
    for node in graph.nodes:
        expression = node.name
        if node.op == "call_function":
            expression = repr((node.target, map_arg((node.args, node.kwargs), names.__getitem__)))
            marks = {mark_of(argument) for argument in node.all_input_nodes}
            if MARK not in node.meta and expression in made:
                node.meta[MARK] = made[expression]
            elif MARK not in node.meta and _repeats(node) and len(marks) == 1:
                node.meta[MARK] = marks.pop()
            elif MARK in node.meta:
                made[expression] = node.meta[MARK] if made.get(expression, node.meta[MARK]) == node.meta[MARK] else None
        names[node] = f"%{numbers.setdefault(mark_of(node) or expression, len(numbers))}"


def _repeats(node: torch.fx.Node) -> bool:
    """Whether a node's result has the global form of its arguments, if these have the same."""
    return node.target in IDENTITIES or node.target in SUMS and all(isinstance(x, torch.fx.Node) for x in node.args)


def has_same_shape(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    """Whether two local tensors have the same shape on every rank."""
    if _uneven.get():
        mark = mark_of(a)
        return mark is not None and mark == mark_of(b)
    return equal(value_of(a).shape, value_of(b).shape)
