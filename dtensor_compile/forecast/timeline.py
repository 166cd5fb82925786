"""The timeline of a step as columns of numbers, for pictures and traces.

A step of 32 layers has some ten thousand spans: each text is kept once, and referred to by its index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dtensor_compile.graph.node_costs import Operation, SentCollective
from dtensor_compile.report.schedule import Schedule, Timed

COMPUTE = "compute"


class StepSpan(NamedTuple):
    """One kernel or collective: its stream, name, module and line, and its begin and duration in nanoseconds; of a
    collective those in which nothing computes."""

    stream: str
    name: str
    module: str
    where: str
    start: int
    duration: int
    exposed: int


@dataclass(frozen=True)
class Timeline:
    """Spans by stream.

    Attributes:
        streams: ``"compute"``, and the mesh dims that communicate.
        texts: names of kernels, modules and lines.
        rows: fields of a `StepSpan` each, texts by their indices.
    """

    streams: tuple[str, ...]
    texts: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]

    def spans(self) -> Iterator[StepSpan]:
        """The spans, by stream in the order of time."""
        for stream, name, module, where, *times in self.rows:
            start, duration, exposed = times
            texts = self.texts[name], self.texts[module], self.texts[where]
            yield StepSpan(self.streams[stream], *texts, start, duration, exposed)


def timeline_of(timing: Schedule, operations: Sequence[Operation], collectives: Sequence[SentCollective]) -> Timeline:
    """The timeline of a schedule of these operations and collectives, with a stream for each mesh dim."""
    streams, texts = _Numbers(), _Numbers()
    streams(COMPUTE)
    rows = []
    for timed in timing.compute:
        this = operations[timed.index]
        about = (texts(this.name), texts(this.module), texts(this.where))
        rows.append((0, *about, *_nanoseconds(timed), 0))
    for timed in timing.communication:
        sent = collectives[timed.index]
        about = (texts(sent.kind), texts(sent.module), texts(sent.where))
        exposed = round(timing.exposed[timed.index] * 1e9)
        rows.append((streams(sent.mesh_dim), *about, *_nanoseconds(timed), exposed))
    return Timeline(tuple(streams.known), tuple(texts.known), tuple(rows))


class _Numbers:
    """Numbers texts in the order in which they come."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.known.setdefault(text, len(self.known))


def _nanoseconds(timed: Timed) -> tuple[int, int]:
    """Begin and duration; both ends are rounded, so that a span never overlaps the next."""
    begin, end = round(timed.start * 1e9), round((timed.start + timed.seconds) * 1e9)
    return begin, end - begin


def merged(spans: Sequence[StepSpan], same: Callable[[StepSpan], object], gap: int) -> list[list[StepSpan]]:
    """Spans of one stream in groups: neighbours that are `same`, with at most `gap` nanoseconds between them."""
    found: list[list[StepSpan]] = []
    for span in spans:
        last = found[-1][-1] if found else None
        if last is not None and same(last) == same(span) and span.start - last.start - last.duration <= gap:
            found[-1].append(span)
        else:
            found.append([span])
    return found
