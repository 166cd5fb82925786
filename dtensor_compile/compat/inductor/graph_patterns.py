"""Patterns that cannot be in a graph are not looked for.

Inductor has some 150 patterns for its passes over a joint graph, most of them for attention, that end in a view or a
transposition: in a graph with thousands of those, such as that around blocks that are compiled once, each is tried at
each of them. One whose operators are not all in the graph matches nowhere.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import hook, needs, patch

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import PatternExpr, PatternMatcherPass

_APPLY = patch("torch._inductor.pattern_matcher:PatternMatcherPass.apply", "self gm")
#: Operators of which a pattern needs one, of each set; by pattern.
_Needs = tuple[frozenset[Any], ...]
_known: weakref.WeakKeyDictionary[Any, _Needs] = weakref.WeakKeyDictionary()


@needs(
    "patterns that cannot be in a graph are not looked for",
    _APPLY,
    hook("torch._inductor.pattern_matcher:CallFunction"),
    hook("torch._inductor.pattern_matcher:MultiOutputPattern"),
    without="large graphs take a few percent longer to compile",
    upstream="not reported: every pattern is tried at every node that could be its last",
    remove_when="PatternMatcherPass tries patterns whose operators are all in the graph",
)
@contextlib.contextmanager
def possible_patterns() -> Iterator[None]:
    """While active, Inductor tries on this thread those patterns alone whose operators are in a graph.

    A pass goes from the last node to the first and matches what comes before each, so that what it puts in place of a
    match is part of no later one: the operators of the graph when it begins are all that count.
    """

    def apply(stock: Any, self: PatternMatcherPass, gm: Any) -> Any:
        graph = gm.graph if isinstance(gm, torch.fx.GraphModule) else gm
        present = frozenset(node.target for node in graph.nodes if node.op == "call_function")
        possible = copy.copy(self)
        possible.patterns = type(self.patterns)(list)
        for end, entries in self.patterns.items():
            if end[0] != "call_function" or end[1] in present:
                possible.patterns[end] = [
                    entry for entry in entries if all(not present.isdisjoint(these) for these in _needed(entry.pattern))
                ]
        return stock(possible, gm)

    with patched(_APPLY, apply):
        yield


def _needed(pattern: PatternExpr) -> _Needs:
    """What a pattern needs, which is found out once."""
    if pattern not in _known:
        _known[pattern] = _operators(pattern)
    return _known[pattern]


def _operators(pattern: PatternExpr) -> _Needs:
    from torch._inductor.pattern_matcher import CallFunction, MultiOutputPattern

    found: dict[frozenset[Any], None] = {}
    seen: set[int] = set()  # parts are shared, so that a pattern has many more paths than parts
    left: list[Any] = [pattern]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, CallFunction):
            found[frozenset(part.fns_set)] = None
            left += part.args
            left += part.kwargs.values()
        elif isinstance(part, MultiOutputPattern):
            left += part.outputs
        elif isinstance(part, (list, tuple)):
            left += part
    return tuple(found)
