"""The report as a trace in Chrome's format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Input: a `Report`. Output: JSON text. A backend is a process, its streams are threads; the graphs run one after the
other in the order in which they were compiled. In addition to compute and communication, there are threads for the
graphs and for the exposed parts of collectives, which end with the collective.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from dtensor_compile.report.model import Graph, Report, Side, Span

#: Threads of a process, in display order.
THREADS = ("graphs", "compute", "communication", "exposed")


def to_trace(report: Report) -> str:
    """The report as JSON text of the trace event format; times are estimates in microseconds."""
    sides = [report.ours, *([report.stock] if report.stock else [])]
    about = {name: getattr(report, name) for name in ("target", "torch", "world", "rank", "cluster")}
    events = [event for process, side in enumerate(sides, 1) for event in _events(process, side)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}, separators=(",", ":"))


def process_with_threads(process: int, name: str, threads: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The events that name a process, and its threads in the order in which they are displayed."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for thread, thread_name in enumerate(threads):
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": thread_name}}
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _events(process: int, side: Side) -> Iterator[dict[str, Any]]:
    yield from process_with_threads(process, side.name, THREADS)
    starts = itertools.accumulate((graph.seconds for graph in side.graphs), initial=0.0)
    for graph, start in zip(side.graphs, starts):
        about = {"nodes": graph.nodes, "phase": graph.phase, "exposed_us": _us(graph.exposed_seconds)}
        yield _complete(process, "graphs", f"{graph.function} {graph.phase}".strip(), start, graph.seconds, about)
        for span in graph.spans:
            yield from _span(process, side, graph, span, start + span.start)


def _span(process: int, side: Side, graph: Graph, span: Span, start: float) -> Iterator[dict[str, Any]]:
    about: dict[str, Any] = {"line": span.where, "module": span.module, "phase": graph.phase}
    if span.collective is None:
        yield _complete(process, span.stream, span.name, start, span.seconds, about)
        return
    this = side.collectives[span.collective]
    exposed = this.exposed_seconds / this.calls
    about |= {"code": this.source.code, "bytes": this.bytes // this.calls, "mesh_dim": this.mesh_dim}
    about |= {"ranks": this.ranks, "local_shape": list(this.shape), "dtype": this.dtype, "exposed_us": _us(exposed)}
    if this.redistribution is not None:
        cause = side.redistributions[this.redistribution]
        about |= {"change": f"{cause.before}->{cause.after}", "plan": list(cause.plan)}
        about |= {"why": "asked for" if cause.explicit else f"for {cause.operator}"}
    if this.also:
        about |= {"carries": 1 + len(this.also)}
    name = f"{this.kind}[{this.mesh_dim}]"
    yield _complete(process, span.stream, name, start, span.seconds, about)
    if exposed > 0:
        waits = start + span.seconds - exposed
        yield _complete(process, "exposed", f"waits for {name}", waits, exposed, {"line": span.where})


def _complete(
    process: int, thread: str, name: str, start: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    event = {"ph": "X", "pid": process, "tid": THREADS.index(thread), "cat": thread, "name": name or "graph"}
    # Readers round to nanoseconds: adjacent spans must not overlap by one.
    begin, end = round(start * 1e9), round((start + seconds) * 1e9)
    return event | {"ts": begin / 1000, "dur": (end - begin) / 1000, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
