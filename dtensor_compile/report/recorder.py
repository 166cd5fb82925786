"""`record`: what happens to every graph that is compiled while it is entered.

    with dtensor_compile.record() as rec:
        compiled(x).sum().backward()
    rec.bytes_sent          # bytes that this rank sends in one forward and backward

Works for this backend, and for stock Inductor through `observe_stock`, so that both are counted by the same code. Graphs are not
taken from Inductor's caches while a recording is on, because a cached graph has no stages to look at.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat import mesh as compat_mesh
from dtensor_compile.compat.inductor import GraphPass
from dtensor_compile.compat.shapes import size_hints
from dtensor_compile.decisions import Decision
from dtensor_compile.lowering.plan import StepKind, elements_sent
from dtensor_compile.passes.nodes import read, redistributions, source_line

log = logging.getLogger("dtensor_compile")

_KINDS: dict[str, StepKind] = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class Collective:
    """One functional collective of a graph.

    Attributes:
        kind: as in `dtensor_compile.lowering.plan`; the operator's name where that has no kind of its own.
        bytes: bytes that this rank sends (0 for a kind whose cost is not known).
        where: the user's line, ``file:line: code``.
    """

    kind: str
    bytes: int
    where: str


@dataclass
class GraphRecord:
    """One compiled graph: ``"joint"`` and ``"inference"`` as captured, ``"forward"`` and ``"backward"`` as lowered."""

    name: str
    collectives: list[Collective] = field(default_factory=list)


@dataclass
class Recording:
    """Everything that was compiled while the recording was on.

    Attributes:
        captured, planned: text of every redistribute node (``S(0)->R file:line: code``), before and after the passes.
        decisions: what passes and lowering decided.
        graphs: the lowered graphs, with their collectives.
    """

    captured: list[str] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    graphs: list[GraphRecord] = field(default_factory=list)

    @property
    def collectives(self) -> list[Collective]:
        return [c for graph in self.graphs for c in graph.collectives]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends when each recorded graph runs once."""
        return sum(c.bytes for c in self.collectives)


_active: list[Recording] = []
_watchers: list[Callable[[str, torch.fx.Graph], None]] = []


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Collects what happens to the graphs compiled meanwhile. Recordings may be nested."""
    recording_ = Recording()
    _active.append(recording_)
    try:
        yield recording_
    finally:
        _active.remove(recording_)


@contextlib.contextmanager
def watch_graphs(watcher: Callable[[str, torch.fx.Graph], None]) -> Iterator[None]:
    """Calls ``watcher(stage, graph)`` for every graph compiled meanwhile: ``"captured"``, ``"planned"``, ``"lowered"``."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def recording() -> bool:
    """Whether somebody looks at the stages of what is compiled."""
    return bool(_active or _watchers)


class GraphLog:
    """What one compilation tells the recordings that were on when it began (the backward may be compiled later)."""

    def __init__(self) -> None:
        self.recordings = list(_active)

    def captured(self, graph: torch.fx.Graph) -> None:
        self._list(graph, "captured")

    def planned(self, graph: torch.fx.Graph) -> None:
        self._list(graph, "planned")

    def _list(self, graph: torch.fx.Graph, attribute: str) -> None:
        _show(attribute, graph)
        if self.recordings:
            texts = [f"{read(node)} {source_line(node)}".strip() for node in redistributions(graph)]
            for recording_ in self.recordings:
                getattr(recording_, attribute).extend(texts)

    def decided(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            log.debug("%s", decision)
        for recording_ in self.recordings:
            recording_.decisions.extend(decisions)

    def lowered(self, graph: torch.fx.Graph) -> None:
        _show("lowered", graph)
        for recording_ in self.recordings:
            recording_.graphs.append(GraphRecord(graph_name(graph), collectives_in(graph)))


def _show(stage: str, graph: torch.fx.Graph) -> None:
    for watcher in _watchers:
        watcher(stage, graph)


def graph_name(graph: torch.fx.Graph) -> str:
    """``"backward"`` for a graph that takes tangents, else ``"forward"``."""
    takes_tangents = any(n.op == "placeholder" and str(n.target).startswith("tangents") for n in graph.nodes)
    return "backward" if takes_tangents else "forward"


def collectives_in(graph: torch.fx.Graph) -> list[Collective]:
    """The functional collectives of a post-grad graph, in order."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", "") != "_c10d_functional":
            continue
        name = node.target._schema.name.split("::")[1]
        if name == "wait_tensor":
            continue
        kind = _KINDS.get(name, name)
        found.append(Collective(kind, _bytes(node, kind), source_line(node)))
    return found


def _bytes(node: torch.fx.Node, kind: str) -> int:
    if kind not in _KINDS.values():
        return 0
    value = node.args[0].meta["val"]
    local = 1
    for size in size_hints(value.shape):
        local *= size
    n = compat_mesh.group_named(str(node.args[-1])).size()
    return elements_sent(kind, n, local) * value.element_size()


def cache_key() -> tuple[Any, ...]:
    """What a lowered graph depends on besides its nodes: who this rank is, and how its process groups are called."""
    return (dist.get_rank(), dist.get_world_size(), tuple(compat_mesh.all_groups()))


def observe_stock(recording_: Recording) -> dict[str, Any]:
    """Options for ``torch.compile(..., backend="inductor")`` that count its collectives into `recording_`."""

    def observe(graph: torch.fx.Graph) -> None:
        recording_.graphs.append(GraphRecord(graph_name(graph), collectives_in(graph)))

    return {"post_grad_custom_post_pass": GraphPass(observe, None)}
