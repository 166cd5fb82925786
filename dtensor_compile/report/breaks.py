"""Graph breaks and recompilations of a recording, with their causes from the catalogue."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtensor_compile.causes import Cause
from dtensor_compile.compat.dynamo.observers.observe import Break
from dtensor_compile.recording.recorder import GraphRecord, Recording
from dtensor_compile.report.model import GraphBreak, Source
from dtensor_compile.report.sources import users_line
from dtensor_compile.report.stock_causes import breaks_under, classify

_CONTEXT = re.compile(r"Developer debug context:[ \t]*(?P<text>.*?)(?:\n\s*\n|\Z)", re.S)

#: Kind of a recompilation -> pattern of the text of the guard that failed; the first match counts.
_RECOMPILE_CAUSES: tuple[tuple[str, str], ...] = (
    ("data-parallel wrapper", r"(FSDP|DDP|REPLICATE)_\w+\("),
    ("dtype", r"dtype mismatch|\.dtype ==|expected dtype"),
    (
        "size",
        r"size mismatch|stride mismatch|rank mismatch|\.size\(|\.stride\(|shape|L\[.*\] [<>=!]+ L\[|Eq\(|[<>]=? \d+",
    ),
    ("placement", r"placement|DTensorSpec|_spec|PLACEMENT"),
    ("mesh", r"mesh|MESH"),
    ("group", r"group|GROUP"),
    ("gradient mode", r"grad_mode|GRAD_MODE|requires_grad|is_grad_enabled"),
    ("object identity", r"___check_obj_id|ID_MATCH|check_obj_id|is not|TYPE_MATCH|___check_type_id"),
    ("number of entries", r"len\(|length"),
    ("value", r"=="),
)


def recompile_cause(reason: str) -> str:
    """The kind of the failed guard, from Dynamo's text of it; ``"other"`` if no row matches."""
    return next((cause for cause, pattern in _RECOMPILE_CAUSES if re.search(pattern, reason)), "other")


def graph_breaks(recording: Recording) -> tuple[GraphBreak, ...]:
    """The graph breaks of a recording, each place and cause once, in order of first occurrence."""
    groups: dict[tuple[Source, str], list[Break]] = {}
    for event in recording.breaks:
        groups.setdefault((users_line(event.stack), cause_of(event).code), []).append(event)
    for events in groups.values():  # if the whole program must be one graph, a break is reported first, and then raised
        events[:] = [event for event in events if event.error] or events
    return tuple(_row(source, events, cause_of(events[0]), recording.graphs) for (source, _), events in groups.items())


def cause_of(event: Break) -> Cause:
    """The cause of a recorded break."""
    return classify(event.kind, event.message, "\n".join(file for file, _, _ in event.stack))


def _row(source: Source, events: Sequence[Break], cause: Cause, graphs: Sequence[GraphRecord]) -> GraphBreak:
    event = events[0]
    same = [g for g in graphs if _same_function(g, event)]
    split = {g.compilation.number for g in same if g.name == "forward" and g.compilation and not g.compilation.reason}
    number = event.compilation.number if event.compilation else 0
    before = sum(len(g.collectives) for g in same if g.compilation and g.compilation.number <= number)
    return GraphBreak(
        source=source,
        called=_called(event),
        cause=cause.code,
        title=cause.title,
        why=cause.why,
        instead=cause.instead,
        breaks_under=breaks_under(cause),
        message=event.message,
        error=event.error,
        count=len(events),
        graphs=len(split),
        collectives_before=before,
        collectives_after=sum(len(g.collectives) for g in same) - before,
    )


def _same_function(graph: GraphRecord, event: Break) -> bool:
    """Whether a graph is a piece of the function that the break split."""
    a, b = graph.compilation, event.compilation
    return a is not None and b is not None and (a.file, a.function) == (b.file, b.function)


def _called(event: Break) -> str:
    """The call at the break: Dynamo's context if it gives one, otherwise its name for the break."""
    match = _CONTEXT.search(event.message)
    text = " ".join(match["text"].split()) if match else ""
    return text or event.kind
