"""A plan as a trace in Chrome's format, for Perfetto (ui.perfetto.dev): a thread for each stream, and memory by kind as
a counter.

Input: a `StepPlan`. Output: JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dtensor_compile.forecast.step_plan import StepPlan
from dtensor_compile.report.chrome_trace import process_with_threads


def to_trace(plan: StepPlan) -> str:
    """The plan as JSON text of the trace event format; times are estimates in microseconds, memory is in bytes."""
    about = {name: getattr(plan, name) for name in ("target", "torch", "mesh", "world", "gpu", "cluster")}
    return json.dumps({"traceEvents": list(_events(plan)), "displayTimeUnit": "ns", "otherData": about})


def _events(plan: StepPlan) -> Iterator[dict[str, Any]]:
    streams = plan.timeline.streams
    yield from process_with_threads(1, f"rank 0 of {plan.mesh}", streams)
    for span in plan.timeline.spans():
        about = {"module": span.module, "line": span.where, "exposed_us": span.exposed / 1e3}
        place = {"pid": 1, "tid": streams.index(span.stream), "ts": span.start / 1e3, "dur": span.duration / 1e3}
        yield {"ph": "X", "name": span.name, "cat": span.stream, **place, "args": about}
    for at in plan.memory.over_time:
        held = dict(zip(plan.memory.kinds, at.bytes))
        yield {"ph": "C", "pid": 1, "name": "memory", "ts": round(at.seconds * 1e9) / 1e3, "args": held}
