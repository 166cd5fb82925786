"""`record`: collects the compilation of every graph while active.

    with dtensor_compile.record() as rec:
        compiled(x).sum().backward()
    rec.bytes_sent          # bytes that this rank sends in one forward and backward
    print(rec.report())     # all of it, with lines, causes and estimated times

Works for this backend, and for others with ``record(others=True)``, so that both are counted by the same code. Graphs
are not taken from Inductor's caches while a recording is active, because a cached graph has no stages to inspect.

The recorder only collects; ``report/build.py`` makes a `dtensor_compile.report.model.Report` from the result.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.dynamo.observers.observe import (
    Break,
    FrameCompilation,
    current_compilation,
    watch_dynamo,
    watch_graphs_of_others,
)
from dtensor_compile.compat.dynamo.observers.phases import watch_phases
from dtensor_compile.compat.inductor.compile import GraphPass
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.extra_copies import extra_copies
from dtensor_compile.graph.node_costs import Operation, SentCollective, device_of, operations_of
from dtensor_compile.recording.profile import Profile

if TYPE_CHECKING:
    from dtensor_compile.report.model import Report
    from dtensor_compile.schedule.found_order import KernelOrder
    from dtensor_compile.topology.links import Cluster

log = logging.getLogger("dtensor_compile")


@dataclass
class GraphRecord:
    """One lowered graph, ``"forward"`` or ``"backward"``.

    Attributes:
        collectives: in order.
        operations: timed operations in order, including starts and waits of collectives.
        nodes: number of nodes.
        compilation: that of its frame; None for a backward pass that another backend compiled when it first ran.
        extra_copies: bytes that copies for collectives write in separate kernels (`graph.extra_copies`).
        order: of the compiled kernels, from which `collectives` and `operations` are then read; None if there are
            none.
        device: type of the device that it computes on.
    """

    name: str
    collectives: list[SentCollective] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    nodes: int = 0
    compilation: FrameCompilation | None = None
    extra_copies: int = 0
    order: KernelOrder | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class CapturedRedistribution:
    """One redistribute node as it was captured.

    Attributes:
        number: identifies it on the nodes that derive from it (``meta[RECORDED_AS]``).
        where, module: the user's line, and the path of the module.
        forced_by: the operator that needed it; empty if the program asked for it.
        source, target, mesh, shape, dtype: as in the node; symbolic sizes by their hints. From one mesh to another
            `mesh` is the two with an arrow between them.
        plan, mesh_dims: the steps, and the names of the mesh dims of those that send; between two meshes, as `mesh`.
        bytes: sent by the plan.
        backward: whether it belongs to the backward pass.
        compilation: the one that captured it.
        calls: number of calls of its block that have it; 1 outside of blocks that are traced once.
    """

    number: int
    where: str
    module: str
    forced_by: str
    source: str
    target: str
    mesh: str
    shape: tuple[int, ...]
    dtype: str
    plan: tuple[str, ...]
    mesh_dims: tuple[str, ...]
    bytes: int
    backward: bool
    compilation: FrameCompilation | None
    calls: int = 1


@dataclass
class OutsideCollectives:
    """The collectives that ran outside of graphs, in order.

    Attributes:
        forward, backward: of the two passes of one call.
    """

    forward: list[SentCollective] = field(default_factory=list)
    backward: list[SentCollective] = field(default_factory=list)


@dataclass
class Recording:
    """Everything that was compiled while the recording was active.

    Attributes:
        captured, planned: text of every redistribute node (``S(0)->R file:line: code``), before and after the passes.
        redistributions: every redistribute node before the passes.
        kept: numbers of those that remain after the passes.
        decisions: of passes and lowering.
        graphs: the lowered graphs, with their collectives.
        compilations: frames compiled by Dynamo, for any backend.
        breaks: graph breaks and errors, for any backend.
        lazy_seconds: measured compile time of backward passes that were compiled when they first ran.
        failed: the error that ended the program; empty if none did.
        topologies: those named in the options of the program's compilations.
        outside: collectives that ran outside of graphs; None if they were not observed.
        step_seconds: measured time of each step on a graph, by its name.
        profile: measured compile time by stage and layer; None if it was not asked for.
        one_step: whether the program ran once, so that a graph counts as often as it ran, and not once.
    """

    captured: list[str] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    redistributions: list[CapturedRedistribution] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    decisions: list[Decision] = field(default_factory=list)
    graphs: list[GraphRecord] = field(default_factory=list)
    compilations: list[FrameCompilation] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    lazy_seconds: float = 0.0
    failed: str = ""
    topologies: list[Cluster] = field(default_factory=list)
    outside: OutsideCollectives | None = None
    step_seconds: dict[str, float] = field(default_factory=dict)
    profile: Profile | None = None
    one_step: bool = False

    @property
    def of_graphs(self) -> tuple[list[Any], ...]:
        """The lists of records of graphs."""
        return self.captured, self.planned, self.redistributions, self.decisions, self.graphs

    @property
    def collectives(self) -> list[SentCollective]:
        return [c for graph in self.graphs for c in graph.collectives]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends when each recorded graph runs once."""
        return sum(c.bytes for c in self.collectives)

    @property
    def seconds(self) -> float:
        """Measured compile time in seconds."""
        return self.lazy_seconds + sum(c.seconds for c in self.compilations if c.outermost)

    def report(self, **about: Any) -> Report:
        """The recording as a report; `about` is as in `dtensor_compile.report.build.build_report`."""
        return self.make_report(**about)

    def make_report(self, **about: Any) -> Report:
        """Replaced by `dtensor_compile.report.build`, which is imported with the package, so that recording code does
        not depend on reports.
        """
        raise NotImplementedError

    def compiling(self, compilation: FrameCompilation) -> None:
        self.compilations.append(compilation)

    def broke(self, event: Break) -> None:
        self.breaks.append(event)

    def compiled_backward(self, seconds: float) -> None:
        self.lazy_seconds += seconds

    def calls_of(self, compilation: FrameCompilation | None) -> int:
        """Number of times that the graphs of a compilation count in sums."""
        return max(compilation.calls, 1) if self.one_step and compilation is not None else 1

    def observe(self, graph: torch.fx.Graph) -> None:
        """Records a lowered graph, of any backend."""
        collectives, operations = operations_of(graph)
        about = len(graph.nodes), current_compilation(), extra_copies(graph)
        self.graphs.append(GraphRecord(graph_name(graph), collectives, operations, *about, device=device_of(graph)))


_active: list[Recording] = []
_watchers: list[Callable[[str, torch.fx.Graph], None]] = []


@contextlib.contextmanager
def record(*, others: bool = False, profile: bool = False) -> Iterator[Recording]:
    """Collects the stages of the graphs compiled meanwhile. Recordings may be nested.

    Args:
        others: also inspect the graphs that other backends compile (graph breaks and recompilations are recorded in any
            case).
        profile: also measure compile time by stage and layer, for any backend (`Recording.profile`).
    """
    recording_ = Recording(profile=Profile() if profile else None)
    _active.append(recording_)
    try:
        with (
            watch_dynamo(recording_),
            watch_graphs_of_others(recording_.observe) if others else contextlib.nullcontext(),
            watch_phases(recording_.profile) if recording_.profile else contextlib.nullcontext(),
        ):
            yield recording_
    finally:
        _active.remove(recording_)


@contextlib.contextmanager
def watch_graphs(watcher: Callable[[str, torch.fx.Graph], None]) -> Iterator[None]:
    """Calls ``watcher(stage, graph)`` for every graph compiled meanwhile: ``"captured"``, ``"planned"``,
    ``"lowered"``.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def recording() -> bool:
    """Whether anything observes the stages of compilation."""
    return bool(_active or _watchers)


def watching() -> bool:
    """Whether anything watches graphs at each stage."""
    return bool(_watchers)


def recordings() -> list[Recording]:
    """The active recordings."""
    return list(_active)


def show_graph(stage: str, graph: torch.fx.Graph) -> None:
    """Passes a graph to the watchers of graphs."""
    for watcher in _watchers:
        watcher(stage, graph)


def graph_name(graph: torch.fx.Graph) -> str:
    """``"backward"`` for a graph that takes tangents, else ``"forward"``."""
    takes_tangents = any(n.op == "placeholder" and str(n.target).startswith("tangents") for n in graph.nodes)
    return "backward" if takes_tangents else "forward"


def collectives_in(graph: torch.fx.Graph) -> list[SentCollective]:
    """The functional collectives of a post-grad graph, in order."""
    return operations_of(graph)[0]


def cache_key() -> tuple[Any, ...]:
    """Everything besides its nodes that a lowered graph depends on: this rank, and the names of its process groups, if
    any."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    return (dist.get_rank(), dist.get_world_size(), tuple(compat_mesh.all_groups()))


def observe_stock(recording_: Recording) -> dict[str, Any]:
    """Options for ``torch.compile(..., backend="inductor")`` that count its collectives into `recording_`."""
    return {"post_grad_custom_post_pass": GraphPass(recording_.observe, None)}
