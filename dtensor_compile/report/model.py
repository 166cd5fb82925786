"""The report as data: communication of a program, graph breaks, decisions, and costs.

`Report` is the root. Everything in it is text, numbers and tuples, so that it survives a round trip through JSON
(`to_json`, `from_json`; ``docs/report.schema.json`` describes the form, `schema` generates it from these classes).
Times are seconds and estimates unless the name says that they were measured; bytes are those that one rank sends in one
forward and backward."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from dtensor_compile.errors import DTensorCompileError
from dtensor_compile.report.dataclass_forms import read_as, schema_of

#: Version of the form. The first number changes when something is removed or changes its meaning, the second when
#: something is added.
VERSION = "1.6"

Phase = Literal["forward", "backward"]
#: Fate of a redistribution: sent, removed by the passes, or local (a slice, which needs no message).
Fate = Literal["sent", "removed", "local"]


class ReportFormatError(DTensorCompileError, ValueError):
    """A file is not a report, or has another version."""


@dataclass(frozen=True)
class Source:
    """A line of the user's program, with up to two lines around it. `file` is empty and `line` 0 if it is unknown."""

    file: str = ""
    line: int = 0
    code: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}" if self.file else ""


@dataclass(frozen=True)
class GraphBreak:
    """A place at which a graph ends.

    Attributes:
        source: the user's line.
        called: the call at that place, as Dynamo names it.
        cause: code of the catalogue of causes (``docs/causes.md``).
        title, why, instead: texts of that cause.
        breaks_under: the backends that break there: every one, stock ones only, this one only.
        message: Dynamo's message.
        error: whether it ended the compilation (``fullgraph=True``, an error in the compiler) instead of splitting the
            graph.
        count: number of visits by Dynamo: in each frame that contains it, inlined or not, at each compilation.
        graphs: number of graphs into which all of its breaks split the function.
        collectives_before, collectives_after: collectives on either side of it, which cannot be planned together.
    """

    source: Source
    called: str
    cause: str
    title: str
    why: str
    instead: str
    breaks_under: Literal["every backend", "stock", "dtensor"]
    message: str
    error: bool = False
    count: int = 1
    graphs: int = 0
    collectives_before: int = 0
    collectives_after: int = 0


@dataclass(frozen=True)
class Recompile:
    """One more compilation of a function that was compiled before.

    Attributes:
        source: the function's first line.
        function: its name.
        cause: the kind of the failed guard: ``"size"``, ``"placement"``, ``"mesh"``, ...
        reason: that guard.
        measured_seconds: duration of the compilation.
    """

    source: Source
    function: str
    cause: str
    reason: str
    measured_seconds: float


@dataclass(frozen=True)
class Redistribution:
    """One change of placement, as captured.

    Attributes:
        source: the user's line.
        module: path of the module whose forward contains it (``blocks.0.attention``); empty outside of modules.
        explicit: whether the program asked for it; otherwise `operator` needed its input redistributed.
        operator: the operator that forced it; empty if it is explicit.
        before, after: placements in text form (``P(sum)``, ``S(0)R``).
        shape, dtype: of the global tensor; for a symbolic size the value seen while tracing.
        mesh: text of the mesh; `mesh_dims` are the names of the dims whose placement changes.
        plan: the planned steps (``all_gather[tp] S(0)->R``).
        phase: forward or backward.
        fate: see `Fate`.
        bytes_before: bytes if it were sent as captured; `bytes` are those that are sent in the end.
        seconds, exposed_seconds: of its collectives; while exposed, nothing computes.
        decided_by, reason: the pass that changed it, and its reason; empty if none did.
    """

    source: Source
    module: str
    explicit: bool
    operator: str
    before: str
    after: str
    shape: tuple[int, ...]
    dtype: str
    mesh: str
    mesh_dims: tuple[str, ...]
    plan: tuple[str, ...]
    phase: Phase
    fate: Fate
    bytes_before: int
    bytes: int
    seconds: float
    exposed_seconds: float
    decided_by: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Collective:
    """One collective of a lowered graph.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ...
        mesh_dim: name of the mesh dim that its group belongs to, or the group's own name.
        ranks: number of ranks in the group.
        source, module, shape, dtype, phase, bytes, seconds, exposed_seconds: as in `Redistribution`; `shape` is that of
            the local input.
        graph: index in `Side.graphs`; None for one outside of graphs, whose time counts as fully exposed.
        redistribution: index in `Side.redistributions`; None for one that the program called itself.
        also: indices of the other redistributions that it carries, if collectives were merged.
        calls: number of its runs in a step; bytes and times are of all of these.
    """

    kind: str
    mesh_dim: str
    ranks: int
    source: Source
    module: str
    shape: tuple[int, ...]
    dtype: str
    phase: Phase
    bytes: int
    seconds: float
    exposed_seconds: float
    graph: int | None
    redistribution: int | None = None
    also: tuple[int, ...] = ()
    calls: int = 1


@dataclass(frozen=True)
class DecisionRow:
    """A `dtensor_compile.decisions.Decision`, with its line; attributes as there."""

    kind: str
    source: Source
    reason: str
    before: str = ""
    after: str = ""
    left_alone: bool = False
    seconds: float | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class LeftAlone:
    """Number of stages (kinds of decisions) that left something alone, and the largest possible cost of that, as far as
    an estimate exists.
    """

    stages: int = 0
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class Outside:
    """Sums over the collectives that run outside of graphs (in eager, hooks, reducers); `Side.totals` has them too."""

    count: int
    bytes: int


@dataclass(frozen=True)
class Span:
    """An operator or collective that runs in a graph, on the ``"compute"`` or the ``"communication"`` stream.

    Attributes:
        name: of the operator or of the kind of collective.
        start, seconds: from the beginning of the graph.
        where: ``file:line`` of the user's line; empty if unknown.
        module: path of the module.
        collective: index in `Side.collectives`; None for compute.
    """

    name: str
    stream: Literal["compute", "communication"]
    start: float
    seconds: float
    where: str
    module: str
    collective: int | None = None


@dataclass(frozen=True)
class Graph:
    """One lowered graph.

    Attributes:
        function: the compiled function.
        nodes: number of nodes.
        compute_seconds, communication_seconds, exposed_seconds, seconds: of one run; `seconds` is compute and exposed.
        spans: the schedule.
        rests_on: source of order and times: the compiled ``"kernels"``, or the ``"graph"`` before them, if there are
            none.
        calls: number of its runs in a step; its times are of one run.
    """

    function: str
    phase: Phase
    nodes: int
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    seconds: float
    spans: tuple[Span, ...] = ()
    rests_on: Literal["kernels", "graph"] = "graph"
    calls: int = 1


@dataclass(frozen=True)
class Total:
    """Sums over the collectives that share a `name` (a module, a mesh dim, a kind)."""

    name: str
    count: int
    bytes: int
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Totals:
    """Sums over all collectives of one side: all of them, and grouped by module, mesh dim and kind."""

    all: Total
    by_phase: tuple[Total, ...] = ()
    by_kind: tuple[Total, ...] = ()
    by_mesh_dim: tuple[Total, ...] = ()
    by_module: tuple[Total, ...] = ()


@dataclass(frozen=True)
class StageTime:
    """Measured compile time of a part of a stage, without nested phases.

    Attributes:
        stage: one of `recording.profile.STAGES`.
        part: the phase as torch calls it, or the step of this package; `count` is how often it was begun.
    """

    stage: str
    part: str
    count: int
    measured_seconds: float


@dataclass(frozen=True)
class LayerTime:
    """Measured compile time of a stage for one layer (``blocks.3``), all of its modules together."""

    layer: str
    stage: str
    measured_seconds: float


@dataclass(frozen=True)
class Side:
    """A program under one backend.

    Attributes:
        name: ``"dtensor"``, or the other backend of the program.
        missed: missed optimizations and reasons: a matmul that was not decomposed, a collective that is not hidden.
        compile_seconds: measured, all compilations together.
        failed: the error with which the program ended; everything else covers what ran until then. Empty if it ran to
            its end.
        left_alone: the sum over those of `decisions` that report that something was left alone.
        outside: collectives outside of graphs; None if they were not observed.
        stages, layers: compile time, if it was profiled; `stages` add up to it, `layers` are parts of them.
    """

    name: str
    breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    redistributions: tuple[Redistribution, ...]
    collectives: tuple[Collective, ...]
    decisions: tuple[DecisionRow, ...]
    missed: tuple[DecisionRow, ...]
    graphs: tuple[Graph, ...]
    totals: Totals
    compile_seconds: float
    failed: str = ""
    left_alone: LeftAlone = LeftAlone()
    outside: Outside | None = None
    stages: tuple[StageTime, ...] = ()
    layers: tuple[LayerTime, ...] = ()


@dataclass(frozen=True)
class Report:
    """One program, compiled and analyzed.

    Attributes:
        version: of this form, `VERSION`.
        target: the program, as the user named it.
        torch: release of torch.
        world, rank, simulated: the job, and whether its ranks were simulated.
        cluster: name of the machine for which times were estimated.
        cluster_from: reason for that machine.
        ours: the program under this backend (or under those that a script chose).
        stock: the same under stock torch; None if that was not requested or is not possible.
        whole: the same under this backend, compiled as a whole, if `ours` compiles parts of the model one by one.
    """

    version: str
    target: str
    torch: str
    world: int
    rank: int
    simulated: bool
    cluster: str
    ours: Side
    stock: Side | None = None
    cluster_from: str = ""
    whole: Side | None = None


def to_dict(report: Report) -> dict[str, Any]:
    """The report as dicts, lists, text and numbers."""
    return json.loads(to_json(report))


def to_json(report: Report) -> str:
    """The report as JSON text."""
    return json.dumps(dataclasses.asdict(report), indent=1)


def from_json(text: str) -> Report:
    """Reads a report that `to_json` wrote.

    Raises:
        ReportFormatError: the text is not a report, or has an unsupported version.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ReportFormatError(f"not JSON: {error}") from None
    version = data.get("version") if isinstance(data, dict) else None
    if not isinstance(version, str) or version.split(".")[0] != VERSION.split(".", maxsplit=1)[0]:
        raise ReportFormatError(
            f"not a report of version {VERSION}: its version is {version!r}; generate it again with this release"
        )
    try:
        return read_as(Report, data)
    except (KeyError, TypeError, ValueError) as error:
        raise ReportFormatError(f"not a report: {type(error).__name__}: {error}") from None


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of the output of `to_json`, generated from the classes here."""
    definitions: dict[str, Any] = {}
    root = schema_of(Report, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dtensor-compile report",
        "description": f"Version {VERSION}. Seconds are estimates unless named measured; bytes are what one rank "
        "sends.",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }
