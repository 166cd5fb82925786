"""Builds a report from a recording: matches redistributions with their collectives, passes and times, and breaks with
their causes.

Input: a `Recording` (and one of stock torch). Output: a `Report`. Everything is a function of the recording and of the
cluster for which times are estimated, so that one recording can be reported for several clusters.

A function that was compiled several times counts once, as it was compiled last, since that code runs from then on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtensor_compile.compat.dynamo.observers.observe import FrameCompilation
from dtensor_compile.decisions import Decision
from dtensor_compile.recording.profile import STAGES, Profile
from dtensor_compile.recording.recorder import CapturedRedistribution, GraphRecord, Recording
from dtensor_compile.report import model
from dtensor_compile.report.breaks import graph_breaks, recompile_cause
from dtensor_compile.report.by_part import compared_with_whole
from dtensor_compile.report.machine import Machine, machine_of
from dtensor_compile.report.missed_overlap import missed
from dtensor_compile.report.model import (
    DecisionRow,
    Graph,
    LayerTime,
    LeftAlone,
    Redistribution,
    Report,
    Side,
    Span,
    StageTime,
    Total,
    Totals,
)
from dtensor_compile.report.recorded import Recordings
from dtensor_compile.report.schedule import Schedule, schedule
from dtensor_compile.report.sources import source_at, source_of
from dtensor_compile.topology.links import CLUSTERS, Cluster, collective_seconds

#: Placeholder for the module path of a line outside of modules.
NO_MODULE = "(no module)"


def build_report(
    recording: Recording,
    *,
    stock: Recording | None = None,
    whole: Recording | None = None,
    parts: Sequence[str] = (),
    target: str = "",
    cluster: str | None = None,
    simulated: bool = False,
    name: str = "dtensor",
) -> Report:
    """The report of a recording.

    Args:
        recording: the program under this backend, or under those that a script chose.
        stock: the same program under stock torch.
        whole, parts: the same under this backend as a whole, if it compiles parts one by one, and their names.
        target: the reported program, as the user named it.
        cluster: name of the machine for which times are estimated, one of `dtensor_compile.topology.links.CLUSTERS`;
            None: that of `machine_of`.
        simulated: whether the ranks of the job are simulated.
        name: the backend of `recording`.
    """
    machine = Machine(CLUSTERS[cluster], "as asked for") if cluster is not None else machine_of(recording)
    running = dist.is_available() and dist.is_initialized()
    ours = build_side(recording, machine.cluster, name if whole is None else f"{name}, by part")
    as_whole = build_side(whole, machine.cluster, f"{name}, whole") if whole is not None else None
    return Report(
        version=model.VERSION,
        target=target,
        torch=torch.__version__,
        world=dist.get_world_size() if running else 1,
        rank=dist.get_rank() if running else 0,
        simulated=simulated,
        cluster=machine.cluster.name,
        cluster_from=machine.known_from,
        ours=ours if as_whole is None else compared_with_whole(ours, as_whole, parts),
        stock=build_side(stock, machine.cluster, "stock") if stock is not None else None,
        whole=as_whole,
    )


def report_of(found: Recordings, **about: Any) -> Report:
    """The report of a program; `about` is as in `build_report`."""
    return build_report(found.ours, stock=found.stock, whole=found.whole, parts=found.parts, **about)


Recording.make_report = build_report  # type: ignore[method-assign, assignment]  # recording may not import report


def build_side(recording: Recording, cluster: Cluster, name: str) -> Side:
    """One side of a report: the program under one backend, from `recording`."""
    outdated = _outdated(recording)
    graphs = [
        graph for graph in recording.graphs if graph.compilation is None or graph.compilation.number not in outdated
    ]
    captured = [r for r in recording.redistributions if r.compilation is None or r.compilation.number not in outdated]
    schedules = [schedule(graph.operations, graph.collectives, cluster) for graph in graphs]
    numbers = {redistribution.number: index for index, redistribution in enumerate(captured)}
    collectives = [
        row
        for index, (graph, timing) in enumerate(zip(graphs, schedules))
        for row in _collectives(graph, timing, index, numbers, recording.calls_of(graph.compilation))
    ]
    carried = [carried for graph in graphs for carried in (this.carries for this in graph.collectives)]
    redistributions = tuple(
        _redistribution(r, recording, list(_sent(r.number, collectives, carried))) for r in captured
    )
    collectives += _outside(recording, cluster)
    first = itertools.accumulate((len(graph.collectives) for graph in graphs), initial=0)
    return Side(
        name=name,
        breaks=graph_breaks(recording),
        recompiles=tuple(_recompile(c) for c in recording.compilations if c.reason),
        redistributions=redistributions,
        collectives=tuple(collectives),
        decisions=tuple(decision_row(d) for d in recording.decisions),
        missed=tuple(decision_row(d) for graph, timing in zip(graphs, schedules) for d in missed(graph, timing)),
        graphs=tuple(
            _graph(graph, timing, start, recording.calls_of(graph.compilation))
            for graph, timing, start in zip(graphs, schedules, first)
        ),
        totals=_totals(collectives),
        compile_seconds=recording.seconds,
        failed=recording.failed,
        left_alone=left_alone(recording.decisions),
        outside=_sums_outside(recording),
        stages=_stages(recording.profile),
        layers=_layers(recording.profile),
    )


def _stages(profile: Profile | None) -> tuple[StageTime, ...]:
    """Parts of stages in the order of the stages, the longest first."""
    order = {stage: place for place, stage in enumerate(STAGES)}
    rows = [StageTime(*key, spent.count, spent.seconds) for key, spent in profile.parts.items()] if profile else []
    return tuple(sorted(rows, key=lambda row: (order.get(row.stage, len(order)), -row.measured_seconds)))


def _layers(profile: Profile | None) -> tuple[LayerTime, ...]:
    return tuple(LayerTime(*key, spent.seconds) for key, spent in profile.layers.items()) if profile else ()


def decision_row(decision: Decision) -> DecisionRow:
    """A decision with its line."""
    return DecisionRow(
        decision.kind,
        source_of(decision.where),
        decision.reason,
        decision.before,
        decision.after,
        left_alone=decision.left_alone,
        seconds=decision.seconds,
        bytes=decision.bytes,
    )


def left_alone(decisions: Sequence[Decision]) -> LeftAlone:
    """The stages among `decisions` that left something alone, and the cost of that."""
    these = [decision for decision in decisions if decision.left_alone]
    stages = len({decision.kind for decision in these})
    return LeftAlone(stages, sum((d.seconds or 0.0 for d in these), 0.0), sum(d.bytes or 0 for d in these))


def _outdated(recording: Recording) -> set[int]:
    """Numbers of the compilations whose function was compiled again later; in one step both may have run."""
    latest: dict[tuple[str, str, int], list[int]] = {}
    outdated: set[int] = set()
    for this in recording.compilations:
        earlier = latest.setdefault((this.file, this.function, this.line), [])
        if this.reason and earlier:
            outdated.add(earlier.pop())
        if not (recording.one_step and this.calls):
            earlier.append(this.number)
    return outdated


def _recompile(this: FrameCompilation) -> model.Recompile:
    source = source_at(this.file, this.line)
    return model.Recompile(source, this.function, recompile_cause(this.reason), this.reason, this.seconds)


def _collectives(
    graph: GraphRecord, timing: Schedule, index: int, numbers: dict[int, int], calls: int
) -> Iterable[model.Collective]:
    seconds = {timed.index: timed.seconds for timed in timing.communication}
    for i, this in enumerate(graph.collectives):
        carried = [numbers[number] for number, _ in this.carries if number in numbers]
        first, also = carried[0] if carried else None, carried[1:]
        yield model.Collective(
            kind=this.kind,
            mesh_dim=this.mesh_dim,
            ranks=len(this.ranks),
            source=source_of(this.where),
            module=this.module,
            shape=this.shape,
            dtype=this.dtype,
            phase="backward" if graph.name == "backward" else "forward",
            bytes=this.bytes * calls,
            seconds=seconds[i] * calls,
            exposed_seconds=timing.exposed[i] * calls,
            graph=index,
            redistribution=first,
            also=tuple(also),
            calls=calls,
        )


def _outside(recording: Recording, cluster: Cluster) -> Iterable[model.Collective]:
    """The collectives outside of graphs, if they are those of one forward and backward."""
    if recording.outside is None:
        return
    phases: tuple[model.Phase, ...] = ("forward", "backward")
    for phase in phases:
        for this in getattr(recording.outside, phase):
            seconds = collective_seconds(cluster, this.kind, this.bytes, this.ranks)
            yield model.Collective(
                kind=this.kind,
                mesh_dim=this.mesh_dim,
                ranks=len(this.ranks),
                source=source_of(this.where),
                module=this.module,
                shape=this.shape,
                dtype=this.dtype,
                phase=phase,
                bytes=this.bytes,
                seconds=seconds,
                exposed_seconds=seconds,
                graph=None,
            )


def _sums_outside(recording: Recording) -> model.Outside | None:
    if recording.outside is None:
        return None
    these = [*recording.outside.forward, *recording.outside.backward]
    return model.Outside(len(these), sum(this.bytes for this in these))


class _Sent(NamedTuple):
    """The share of one collective in one redistribution: bytes and seconds."""

    bytes: int
    seconds: float
    exposed_seconds: float


def _sent(
    number: int, collectives: Sequence[model.Collective], carried: Sequence[tuple[tuple[int, int], ...]]
) -> Iterable[_Sent]:
    """The collectives sent for the redistribution with that number; one shared by several is divided by bytes."""
    for this, carries in zip(collectives, carried):
        own = [sent for other, sent in carries if other == number]
        if own:
            part = sum(own) * this.calls / this.bytes if this.bytes else 1 / len(carries)
            yield _Sent(sum(own) * this.calls, this.seconds * part, this.exposed_seconds * part)


def _redistribution(this: CapturedRedistribution, recording: Recording, sent: Sequence[_Sent]) -> Redistribution:
    by, reason, fate = "", "", "sent"
    if this.number not in recording.kept:
        fate = "removed"
        text = f"{this.source}->{this.target}"
        here = (d for d in recording.decisions if d.where == this.where and d.before.endswith(text))
        decision = next(here, None)
        by, reason = (
            (decision.kind, decision.reason) if decision else ("", "another redistribution needed it, and is gone")
        )
    elif not this.bytes:
        fate = "local"
    elif not sent:
        fate, reason = "removed", "nothing uses its result, or it equals another one"
    return Redistribution(
        source=source_of(this.where),
        module=this.module,
        explicit=not this.forced_by,
        operator=this.forced_by,
        before=this.source,
        after=this.target,
        shape=this.shape,
        dtype=this.dtype,
        mesh=this.mesh,
        mesh_dims=this.mesh_dims,
        plan=this.plan,
        phase="backward" if this.backward else "forward",
        fate=fate,  # type: ignore[arg-type]
        bytes_before=this.bytes * this.calls * recording.calls_of(this.compilation),
        bytes=sum(c.bytes for c in sent),
        seconds=sum((c.seconds for c in sent), 0.0),
        exposed_seconds=sum((c.exposed_seconds for c in sent), 0.0),
        decided_by=by,
        reason=reason,
    )


def _graph(graph: GraphRecord, timing: Schedule, first: int, calls: int) -> Graph:
    compute = [
        Span(o.name, "compute", timed.start, timed.seconds, _line(o.where), o.module)
        for timed in timing.compute
        for o in (graph.operations[timed.index],)
    ]
    communication = [
        Span(c.kind, "communication", timed.start, timed.seconds, _line(c.where), c.module, first + timed.index)
        for timed in timing.communication
        for c in (graph.collectives[timed.index],)
    ]
    return Graph(
        function=graph.compilation.function if graph.compilation else "",
        phase="backward" if graph.name == "backward" else "forward",
        nodes=graph.nodes,
        compute_seconds=sum(span.seconds for span in compute),
        communication_seconds=sum(span.seconds for span in communication),
        exposed_seconds=sum(timing.exposed),
        seconds=timing.seconds,
        spans=tuple(sorted([*compute, *communication], key=lambda span: (span.start, span.stream))),
        rests_on="graph" if graph.order is None else "kernels",
        calls=calls,
    )


def _line(where: str) -> str:
    source = source_of(where)
    return f"{source.file}:{source.line}" if source.file else ""


def _totals(collectives: Sequence[model.Collective]) -> Totals:
    def by(key: Callable[[model.Collective], str]) -> tuple[Total, ...]:
        groups: dict[str, list[model.Collective]] = {}
        for collective in collectives:
            groups.setdefault(key(collective), []).append(collective)
        return tuple(
            sorted((_total(name, rows) for name, rows in groups.items()), key=lambda t: (-t.bytes, -t.seconds, t.name))
        )

    return Totals(
        all=_total("all", collectives),
        by_phase=by(lambda c: c.phase),
        by_kind=by(lambda c: c.kind),
        by_mesh_dim=by(lambda c: c.mesh_dim),
        by_module=by(lambda c: c.module or NO_MODULE),
    )


def _total(name: str, rows: Sequence[model.Collective]) -> Total:
    seconds, exposed = sum((c.seconds for c in rows), 0.0), sum((c.exposed_seconds for c in rows), 0.0)
    return Total(name, sum(c.calls for c in rows), sum(c.bytes for c in rows), seconds, exposed)
