"""A report for the terminal: tables, with colour in a terminal and plain elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import IO, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dtensor_compile.report.compare_reports import (
    ReportComparison,
    breaks_text,
    bytes_text,
    describe_break,
    exposed_text,
    graphs_text,
    left_alone_text,
    outside_text,
    seconds_text,
)
from dtensor_compile.report.model import DecisionRow, GraphBreak, Redistribution, Report, Side, Source, StageTime, Total

#: Rows of a long table that are shown by default.
SHOWN = 15
#: Columns if the output is not a terminal.
WIDTH = 200
#: Characters of a line of code in a table.
CODE = 44


def console_for(file: IO[str] | None = None) -> Console:
    """A console on `file` (standard output): of the terminal's width, or plain and of a fixed width elsewhere."""
    file = file or sys.stdout
    return (
        Console(file=file)
        if file.isatty()
        else Console(file=file, width=WIDTH, color_system=None, legacy_windows=False)
    )


def print_report(report: Report, console: Console, *, everything: bool = False) -> None:
    """Prints a report; long tables are truncated to `SHOWN` rows unless `everything`."""
    for part in _parts(report, None if everything else SHOWN, console.is_terminal):
        console.print(part)


def print_comparison(comparison: ReportComparison, console: Console) -> None:
    """Prints the changes from one report to another."""
    table = _table("against the base", console.is_terminal, "", "base", "now", "change")
    for change in comparison.changes:
        text = {"bytes": bytes_text, "s": seconds_text}.get(change.unit, lambda value: f"{value:.0f}")
        percent = f"{(change.now / change.base - 1) * 100:+.1f}%" if change.base else ("+" if change.now else "")
        table.add_row(change.name, text(change.base), text(change.now), percent if change.now != change.base else "")
    console.print(table)
    for title, rows, sign in (("came", comparison.came, "+"), ("went", comparison.went, "-")):
        for row in rows:
            console.print(Text(f"{sign} {row}", style="red" if title == "came" else "green"), soft_wrap=True)


def _parts(report: Report, most: int | None, terminal: bool) -> Iterator[RenderableType]:
    ours, job = report.ours, "simulated" if report.simulated else "real"
    yield Text(f"{report.target}: rank {report.rank} of {report.world} ({job}), torch {report.torch}")
    because = f" ({report.cluster_from})" if report.cluster_from else ""
    yield Text(f"times are estimates for {report.cluster}{because}")
    yield _summary(report, terminal)
    for this in ours.breaks:
        yield _break(this)
    if report.stock and report.stock.breaks:
        yield Text("under stock torch:\n" + "".join(f"  {describe_break(this)}\n" for this in report.stock.breaks))
    if ours.recompiles:
        table = _table("recompiles", terminal, "function", "cause", "guard that did not hold", "seconds (measured)")
        for r in ours.recompiles:
            why = r.cause, _first_line(r.reason), f"{r.measured_seconds:.2f}"
            table.add_row(*map(escape, (f"{r.function} {_place(r.source)}", *why)))
        yield table
    if ours.redistributions:
        yield _redistributions(ours.redistributions, most, terminal)
    own = [c for c in ours.collectives if c.redistribution is None]
    if own:
        table = _table(
            "collectives of the program", terminal, "line", "collective", "local shape", "bytes", "time", "exposed"
        )
        for c in sorted(own, key=lambda c: -c.bytes)[:most]:
            shape = f"{list(c.shape)} {c.dtype}"
            cells = (
                _line(c.source),
                f"{c.kind}[{c.mesh_dim}] {c.phase}",
                shape,
                f"{c.bytes:,}",
                seconds_text(c.seconds),
            )
            table.add_row(*map(escape, (*cells, seconds_text(c.exposed_seconds))))
        yield _cut(table, len(own), most)
    for title, sums in (
        ("module", ours.totals.by_module),
        ("mesh dim", ours.totals.by_mesh_dim),
        ("kind", ours.totals.by_kind),
    ):
        if sums:
            yield _totals(f"by {title}", sums, most, terminal)
    yield from _compile_times(report, most, terminal)
    yield from _decisions("what was decided", ours.decisions, most, terminal)
    yield from _decisions("what did not happen, and why", ours.missed, most, terminal)


def _summary(report: Report, terminal: bool) -> Table:
    sides = [side for side in (report.ours, report.whole, report.stock) if side is not None]
    table = _table("", terminal, "", *(side.name for side in sides))
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[tuple[str, Callable[[Side], str]]] = [
        *([("ended with an error", lambda s: s.failed or "-")] if any(side.failed for side in sides) else []),
        ("graph breaks", lambda s: breaks_text(s.breaks)),
        ("recompiles", lambda s: str(len(s.recompiles))),
        ("graphs", graphs_text),
        ("order and times of", lambda s: ", ".join(sorted({f"the {g.rests_on}" for g in s.graphs})) or "-"),
        ("redistributions", lambda s: str(len(s.redistributions)) if s is not report.stock else "-"),
        ("collectives", lambda s: str(s.totals.all.count)),
        ("bytes sent", lambda s: f"{s.totals.all.bytes:,}"),
        *((f"  {phase}", lambda s, phase=phase: f"{_phase_bytes(s, phase):,}") for phase in ("forward", "backward")),
        ("outside of graphs", lambda s: outside_text(s.outside)),
        ("communication", lambda s: seconds_text(s.totals.all.seconds)),
        ("  exposed", exposed_text),
        ("compute in graphs", lambda s: seconds_text(sum(g.compute_seconds * g.calls for g in s.graphs))),
        ("left alone", lambda s: left_alone_text(s.left_alone)),
        ("compile time (measured)", lambda s: f"{s.compile_seconds:.2f} s"),
    ]
    for name, of in rows:
        table.add_row(name, *(of(side) for side in sides))
    return table


def _compile_times(report: Report, most: int | None, terminal: bool) -> Iterator[Table]:
    """Compile time by stage, of each side, and by layer."""
    sides = [side for side in (report.ours, report.whole, report.stock) if side is not None and side.stages]
    if not sides:
        return
    columns = [f"{side.name} {what}" for side in sides for what in ("(measured)", "share")]
    table = _table("compile time by stage", terminal, "", *columns, "longest parts")
    for stage in dict.fromkeys(row.stage for side in sides for row in side.stages):
        own = [[row for row in side.stages if row.stage == stage] for side in sides]
        cells = [text for side, rows in zip(sides, own) for text in _seconds_and_share(rows, side.stages)]
        parts = [f"{row.part} {row.measured_seconds:.2f} s" for row in own[0] if row.measured_seconds >= 0.005]
        table.add_row(*map(escape, (stage, *cells, ", ".join(parts[: most and 4]))))
    table.add_row("all", *(text for side in sides for text in _seconds_and_share(side.stages, side.stages)), "")
    yield _right(table, 1, 1 + len(columns))
    layers = report.ours.layers
    stages = list(dict.fromkeys(row.stage for row in report.ours.stages))
    stages = [stage for stage in stages if any(row.stage == stage for row in layers)]
    table = _table("compile time by layer (measured)", terminal, "", *stages, "all of these")
    names = list(dict.fromkeys(row.layer for row in layers))
    for name in names[:most]:
        own_of = {row.stage: row.measured_seconds for row in layers if row.layer == name}
        cells = [f"{own_of[stage]:.2f} s" if stage in own_of else "-" for stage in stages]
        table.add_row(*map(escape, (name, *cells, f"{sum(own_of.values()):.2f} s")))
    if names:
        yield _cut(_right(table, 1, 2 + len(stages)), len(names), most)


def _seconds_and_share(rows: Sequence[StageTime], whole: Sequence[StageTime]) -> tuple[str, str]:
    seconds, all = (sum(row.measured_seconds for row in these) for these in (rows, whole))
    return f"{seconds:.2f} s", f"{seconds / all:.0%}"


def _right(table: Table, first: int, end: int) -> Table:
    for column in table.columns[first:end]:
        column.justify = "right"
    return table


def _phase_bytes(side: Side, phase: str) -> int:
    return next((total.bytes for total in side.totals.by_phase if total.name == phase), 0)


def _break(this: GraphBreak) -> Text:
    what = "error" if this.error else "graph break"
    text = Text()
    text.append(f"{what} [{this.cause}] {this.title}", style="bold red")
    text.append(f"  (met {this.count} times)\n" if this.count > 1 else "\n")
    first = this.source.line - len(this.source.before)
    text.append(f"  {this.source.file}:{this.source.line}\n", style="cyan")
    for number, line in enumerate((*this.source.before, this.source.code, *this.source.after), first):
        here = number == this.source.line
        code = line if not here else _indent(this.source) + line
        text.append(f"  {'>' if here else ' '} {number:5} {code}\n", style="bold" if here else "dim")
    called, under = this.called[:200], this.breaks_under
    text.append(f"  called: {called}\n  why: {this.why}\n  instead: {this.instead}\n  breaks under: {under}\n")
    if this.graphs:
        text.append(
            f"  splits the function into {this.graphs} graphs, with {this.collectives_before} collectives before it "
            "and "
            f"{this.collectives_after} behind\n"
        )
    if this.cause == "unknown":
        text.append(f"  Dynamo says: {this.message[:600]}\n")
    return text


def _indent(source: Source) -> str:
    """The indentation of the line itself, guessed from its neighbours if its code was stripped."""
    neighbours = [line for line in (*source.before[::-1], *source.after) if line.strip()]
    return " " * (len(neighbours[0]) - len(neighbours[0].lstrip())) if neighbours else ""


def _redistributions(rows: Sequence[Redistribution], most: int | None, terminal: bool) -> Table:
    columns = (
        "",
        "line",
        "module",
        "change",
        "shape",
        "plan",
        "bytes",
        "time",
        "exposed",
        "why, and what became of it",
    )
    table = _table("redistributions", terminal, *columns)
    for column in (table.columns[i] for i in (0, 6, 7, 8)):
        column.justify, column.no_wrap = "right", True
    groups = _grouped(
        rows,
        lambda r: (
            r.source,
            _any_layer(r.module),
            r.before,
            r.after,
            r.phase,
            r.shape,
            r.dtype,
            r.plan,
            r.fate,
            r.operator,
        ),  # fmt: skip
    )
    order = sorted(
        groups, key=lambda group: (-sum(r.exposed_seconds for r in group), -sum(r.bytes_before for r in group))
    )
    for group in order[:most]:
        first = group[0]
        sent, before = sum(r.bytes for r in group), sum(r.bytes_before for r in group)
        why = ["asked for" if first.explicit else f"for {first.operator}"]
        why += (
            [] if first.fate == "sent" else [f"{first.fate} by {first.decided_by}" if first.decided_by else first.fate]
        )
        cells = (
            _times(group),
            _line(first.source),
            _modules([r.module for r in group]),
            f"{first.before}->{first.after} {first.phase}",
            f"{list(first.shape)} {first.dtype}",
            ", ".join(step.split(" ")[0] for step in first.plan),
            f"{sent:,}" if sent == before else f"{before:,} -> {sent:,}",
            seconds_text(sum(r.seconds for r in group)),
            seconds_text(sum(r.exposed_seconds for r in group)),
            "; ".join(why),
        )
        table.add_row(*map(escape, cells))
    return _cut(table, len(order), most)


_Row = TypeVar("_Row")


def _grouped(rows: Sequence[_Row], key: Callable[[_Row], Hashable]) -> list[list[_Row]]:
    """Equal rows, in order of first occurrence."""
    groups: dict[Hashable, list[_Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _times(group: Sequence[object]) -> str:
    return f"{len(group)} x" if len(group) > 1 else ""


def _any_layer(module: str) -> str:
    """``blocks.3.attention`` -> ``blocks.*.attention``: similar layers become one row."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def _modules(modules: Sequence[str]) -> str:
    return modules[0] if len(set(modules)) == 1 else _any_layer(modules[0])


def _totals(title: str, totals: Sequence[Total], most: int | None, terminal: bool) -> Table:
    table = _table(title, terminal, "", "collectives", "bytes", "time", "exposed")
    for column in table.columns[1:]:
        column.justify = "right"
    for t in totals[:most]:
        table.add_row(
            escape(t.name), str(t.count), f"{t.bytes:,}", seconds_text(t.seconds), seconds_text(t.exposed_seconds)
        )
    return _cut(table, len(totals), most)


def _decisions(title: str, rows: Sequence[DecisionRow], most: int | None, terminal: bool) -> Iterator[Table]:
    if not rows:
        return
    table = _table(title, terminal, "", "what", "line", "change", "why")
    groups = _grouped(
        rows, lambda row: (row.kind, row.source, row.before, row.after, row.left_alone, _NUMBER.sub("", row.reason))
    )
    groups.sort(key=lambda group: not group[0].left_alone)  # a cut table still shows them
    for group in groups[:most]:
        row = group[0]
        change = f"{row.before} -> {row.after}" if row.before != row.after else row.before
        reason = f"left alone{_cost(group)}: {row.reason}" if row.left_alone else row.reason
        table.add_row(*map(escape, (_times(group), row.kind, _line(row.source), change, reason)))
    yield _cut(table, len(groups), most)


def _cost(rows: Sequence[DecisionRow]) -> str:
    """The total cost of rows that leave something alone, in brackets; empty if there is no estimate."""
    seconds, sent = sum(row.seconds or 0.0 for row in rows), sum(row.bytes or 0 for row in rows)
    costs = [seconds_text(seconds)] * (seconds > 0) + [bytes_text(sent)] * (sent > 0)
    return f" ({', '.join(costs)})" if costs else ""


_NUMBER = re.compile(r"[\d.]+")


def _table(title: str, terminal: bool, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD if terminal else box.ASCII2)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _cut(table: Table, rows: int, most: int | None) -> Table:
    if most is not None and rows > most:
        table.caption = f"{rows - most} more: --all shows them"
        table.caption_justify = "left"
    return table


def _place(source: Source) -> str:
    return f"{source.file.rsplit('/', 1)[-1]}:{source.line}" if source.file else ""


def _line(source: Source) -> str:
    code = source.code if len(source.code) <= CODE else source.code[: CODE - 3] + "..."
    return f"{_place(source)}  {code}" if source.file else "-"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
