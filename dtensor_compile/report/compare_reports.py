"""Comparison of two reports, and limits that a report must keep.

`compare` finds the rows that were added and removed, by their content and place. `Limits` are the switches for
continuous integration; `broken` lists the limits that a report exceeds, with the user's lines that contribute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dtensor_compile.errors import DTensorCompileError
from dtensor_compile.report.model import (
    Collective,
    GraphBreak,
    LeftAlone,
    Outside,
    Redistribution,
    Report,
    Side,
    Source,
)


class LimitError(DTensorCompileError, ValueError):
    """A limit does not parse, or needs a base that is not given."""


@dataclass(frozen=True)
class Change:
    """One figure of two reports.

    Attributes:
        name: of the figure.
        base, now: its values.
        unit: ``"bytes"``, ``"s"`` or empty.
    """

    name: str
    base: float
    now: float
    unit: str = ""


@dataclass(frozen=True)
class ReportComparison:
    """Two reports of one program.

    Attributes:
        changes: all figures, including unchanged ones.
        came, went: descriptions of rows that are only in `now`, or only in `base`.
    """

    changes: tuple[Change, ...]
    came: tuple[str, ...]
    went: tuple[str, ...]


def compare(base: Report, now: Report) -> ReportComparison:
    """Changes from `base` to `now` on our side."""
    changes = [
        Change("graph breaks", len(base.ours.breaks), len(now.ours.breaks)),
        Change("recompiles", len(base.ours.recompiles), len(now.ours.recompiles)),
        Change("redistributions", len(base.ours.redistributions), len(now.ours.redistributions)),
        Change("collectives", base.ours.totals.all.count, now.ours.totals.all.count),
        Change("bytes sent", base.ours.totals.all.bytes, now.ours.totals.all.bytes, "bytes"),
        Change("communication", base.ours.totals.all.seconds, now.ours.totals.all.seconds, "s"),
        Change("exposed communication", base.ours.totals.all.exposed_seconds, now.ours.totals.all.exposed_seconds, "s"),
        Change("compile time (measured)", base.ours.compile_seconds, now.ours.compile_seconds, "s"),
    ]
    rows = [Counter(_rows(report.ours)) for report in (base, now)]
    return ReportComparison(tuple(changes), _listed(rows[1] - rows[0]), _listed(rows[0] - rows[1]))


def _rows(side: Side) -> Iterator[str]:
    for b in side.breaks:
        yield describe_break(b)
    for r in side.recompiles:
        yield f"recompile of {r.function} ({r.cause})"
    for d in side.redistributions:
        yield describe_redistribution(d)
    for c in side.collectives:
        if c.redistribution is None:
            yield f"{c.kind}[{c.mesh_dim}] of {list(c.shape)} {c.dtype}, {c.phase}{_at(c.source)}"


def _listed(rows: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{count} x {text}" if count > 1 else text for text, count in sorted(rows.items()))


def describe_break(this: GraphBreak) -> str:
    """One-line description of a graph break."""
    return f"{'error' if this.error else 'graph break'} [{this.cause}] {this.title}{_at(this.source)}"


def describe_redistribution(this: Redistribution) -> str:
    """One-line description of a redistribution, without its line number, which changes with every edit of the file."""
    fate = "" if this.fate == "sent" else f", {this.fate}"
    what = f"{this.before}->{this.after} of {list(this.shape)} {this.dtype}"
    return f"{what}, {this.bytes:,} bytes, {this.phase}{fate}{_at(this.source)}"


def _at(source: Source) -> str:
    return f" at {source.file.rsplit('/', 1)[-1]}: {source.code}" if source.file else ""


# ---- limits --------------------------------------------------------------------------------------------------------

_BYTES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_LIMIT = re.compile(r"(?P<plus>\+?)(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(?P<unit>[a-z%]*)", re.I)


@dataclass(frozen=True)
class Limit:
    """Upper limit of a figure: a value, or that of the base plus a percentage."""

    value: float
    relative: bool

    def of(self, base: float | None) -> float:
        """The upper limit, in the unit of the figure."""
        if not self.relative:
            return self.value
        if base is None:
            raise LimitError("a limit in percent needs --compare BASE.json: save one with --save")
        return base * (1 + self.value / 100)


def parse_limit(text: str, units: dict[str, float]) -> Limit:
    """Parses a limit: ``+5%``, ``10MB``, ``10ms``, ``3``.

    Raises:
        LimitError: `text` is none of those.
    """
    match = _LIMIT.fullmatch(text.strip())
    unit = match["unit"].lower() if match else None
    if match and unit == "%" and match["plus"]:
        return Limit(float(match["number"]), True)
    if match is None or match["plus"] or unit not in units:
        allowed = " or ".join(sorted({"10" + name for name in units}))
        raise LimitError(f"{text!r} is not a limit: write {allowed}, or +5% of a base")
    return Limit(float(match["number"]) * units[unit], False)


@dataclass(frozen=True)
class Limits:
    """Limits of a report, as text of the command's options; None: no limit."""

    max_breaks: str | None = None
    max_bytes: str | None = None
    max_exposed: str | None = None


@dataclass(frozen=True)
class _Figure:
    name: str
    units: dict[str, float]
    value: Callable[[Side], float]
    text: Callable[[float], str]
    #: Rows that contribute to the figure: amount and description of each.
    rows: Callable[[Side], Iterable[tuple[float, str]]]


def _collective_rows(key: Callable[[Collective], float]) -> Callable[[Side], Iterable[tuple[float, str]]]:
    def rows(side: Side) -> Iterable[tuple[float, str]]:
        sums: dict[str, float] = {}
        for c in side.collectives:
            where = f"{c.source.file}:{c.source.line}: {c.source.code}" if c.source.file else "an unknown line"
            text = f"{c.kind}[{c.mesh_dim}], {c.phase}, {where}"
            sums[text] = sums.get(text, 0.0) + key(c)
        return [(value, text) for text, value in sums.items()]

    return rows


def seconds_text(seconds: float) -> str:
    """``1.2 ms``"""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.1f} us"


def bytes_text(number: float) -> str:
    """``3,670,016 bytes``"""
    return f"{number:,.0f} bytes"


def outside_text(outside: Outside | None) -> str:
    """``4 collectives, 41,472 bytes``"""
    if outside is None:
        return "not known"
    if not outside.count:
        return "-"
    return f"{outside.count} collective{'s' * (outside.count != 1)}, {bytes_text(outside.bytes)}"


def graphs_text(side: Side) -> str:
    """The number of graphs, and how often they run in a step where that is more often than once each."""
    runs = sum(graph.calls for graph in side.graphs)
    return f"{len(side.graphs)}, which run {runs} times" if runs != len(side.graphs) else str(runs)


def exposed_text(side: Side) -> str:
    """The exposed time; an upper bound if collectives run outside of graphs, since their overlap is unknown."""
    text = seconds_text(side.totals.all.exposed_seconds)
    return f"at most {text}" if any(c.graph is None for c in side.collectives) else text


def breaks_text(breaks: Sequence[GraphBreak]) -> str:
    """``5`` places with a cause; ``5, met 12 times`` if Dynamo reached one of them more than once."""
    met = sum(this.count for this in breaks)
    return f"{len(breaks)}, met {met} times" if met > len(breaks) else str(len(breaks))


def left_alone_text(left: LeftAlone) -> str:
    """``3 stages, 12.00 ms, 4,096 bytes``, without unknown figures."""
    if not left.stages:
        return "-"
    costs = [seconds_text(left.seconds)] * (left.seconds > 0) + [bytes_text(left.bytes)] * (left.bytes > 0)
    return ", ".join([f"{left.stages} stage{'s' * (left.stages != 1)}", *costs])


_FIGURES: dict[str, _Figure] = {
    "max_breaks": _Figure(
        "graph breaks",
        {"": 1.0},
        lambda side: len(side.breaks),
        lambda value: f"{value:.0f}",
        lambda side: [(1.0, f"{b.source.file}:{b.source.line}: [{b.cause}] {b.source.code}") for b in side.breaks],
    ),
    "max_bytes": _Figure(
        "bytes sent", _BYTES, lambda side: side.totals.all.bytes, bytes_text, _collective_rows(lambda c: c.bytes)
    ),
    "max_exposed": _Figure(
        "exposed communication",
        _SECONDS,
        lambda side: side.totals.all.exposed_seconds,
        seconds_text,
        _collective_rows(lambda c: c.exposed_seconds),
    ),
}

#: Number of lines listed for an exceeded limit.
NAMED = 10


def check_limits(limits: Limits, base: Report | None) -> None:
    """Raises `LimitError` if a limit does not parse, or needs a base that is not given."""
    for key, figure in _FIGURES.items():
        text = getattr(limits, key)
        if text is not None:
            parse_limit(text, figure.units).of(figure.value(base.ours) if base else None)


def broken(limits: Limits, report: Report, base: Report | None = None) -> list[str]:
    """The limits that a report exceeds, each with the contributing lines; empty if it keeps all limits.

    With a base, the lines with the largest increase are listed first.
    """
    lines = []
    for key, figure in _FIGURES.items():
        text = getattr(limits, key)
        if text is None:
            continue
        most = parse_limit(text, figure.units).of(figure.value(base.ours) if base else None)
        value = figure.value(report.ours)
        if value <= most * (1 + 1e-9):
            continue
        lines.append(
            f"--{key.replace('_', '-')} {text}: {figure.name} {figure.text(value)}, at most {figure.text(most)}"
        )
        lines += [f"    {figure.text(amount)}  {what}" for amount, what in _worst(figure, report, base)]
    return lines


def _worst(figure: _Figure, report: Report, base: Report | None) -> Sequence[tuple[float, str]]:
    rows = list(figure.rows(report.ours))
    had = dict((text, amount) for amount, text in figure.rows(base.ours)) if base else {}
    more = sorted((had.get(text, 0.0) - amount, -amount, text) for amount, text in rows if amount > 0)
    return [(-amount, text) for _, amount, text in more[:NAMED]]
