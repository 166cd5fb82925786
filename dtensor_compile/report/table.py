"""A report for the terminal: tables, with colour in a terminal and plain elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dtensor_compile.report.compare import Comparison, bytes_text, seconds_text
from dtensor_compile.report.model import DecisionRow, GraphBreak, Redistribution, Report, Side, Source, Total

#: Rows of a long table that are shown, unless all are asked for.
SHOWN = 15
#: Columns where the output is no terminal.
WIDTH = 150


def console_for(file: IO[str] | None = None) -> Console:
    """A console on `file` (standard output): in a terminal as wide as it is, elsewhere plain and of a fixed width."""
    file = file or sys.stdout
    return Console(file=file) if file.isatty() else Console(file=file, width=WIDTH, color_system=None, legacy_windows=False)


def print_report(report: Report, console: Console, *, everything: bool = False) -> None:
    """Prints a report; long tables are cut to `SHOWN` rows unless `everything`."""
    for part in _parts(report, None if everything else SHOWN, console.is_terminal):
        console.print(part)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints what changed from one report to another."""
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
    yield Text(f"{report.target}: rank {report.rank} of {report.world} ({job}), torch {report.torch}, times for {report.cluster}")
    yield _summary(report, terminal)
    for this in ours.breaks:
        yield _break(this)
    if ours.recompiles:
        table = _table("recompiles", terminal, "function", "cause", "guard that did not hold", "seconds (measured)")
        for r in ours.recompiles:
            table.add_row(*map(escape, (f"{r.function} {_place(r.source)}", r.cause, _first_line(r.reason), f"{r.measured_seconds:.2f}")))
        yield table
    if ours.redistributions:
        yield _redistributions(ours.redistributions, most, terminal)
    own = [c for c in ours.collectives if c.redistribution is None]
    if own:
        table = _table("collectives of the program", terminal, "line", "collective", "local shape", "bytes", "time", "exposed")
        for c in sorted(own, key=lambda c: -c.bytes)[:most]:
            shape = f"{list(c.shape)} {c.dtype}"
            cells = (_line(c.source), f"{c.kind}[{c.mesh_dim}] {c.phase}", shape, f"{c.bytes:,}", seconds_text(c.seconds))
            table.add_row(*map(escape, (*cells, seconds_text(c.exposed_seconds))))
        yield _cut(table, len(own), most)
    for title, totals in (("by module", ours.totals.by_module), ("by mesh dim", ours.totals.by_mesh_dim), ("by kind", ours.totals.by_kind)):
        if totals:
            yield _totals(title, totals, most, terminal)
    yield from _decisions("what was decided", ours.decisions, most, terminal)
    yield from _decisions("what did not happen, and why", ours.missed, most, terminal)


def _summary(report: Report, terminal: bool) -> Table:
    sides = [report.ours, *([report.stock] if report.stock else [])]
    table = _table("", terminal, "", *(side.name for side in sides))
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[tuple[str, Callable[[Side], str]]] = [
        ("graph breaks", lambda s: str(len(s.breaks))),
        ("recompiles", lambda s: str(len(s.recompiles))),
        ("graphs", lambda s: str(len(s.graphs))),
        ("redistributions", lambda s: str(len(s.redistributions)) if s is report.ours else "-"),
        ("collectives", lambda s: str(s.totals.all.count)),
        ("bytes sent", lambda s: f"{s.totals.all.bytes:,}"),
        *((f"  {phase}", lambda s, phase=phase: f"{_phase_bytes(s, phase):,}") for phase in ("forward", "backward")),
        ("communication", lambda s: seconds_text(s.totals.all.seconds)),
        ("  exposed", lambda s: seconds_text(s.totals.all.exposed_seconds)),
        ("compute", lambda s: seconds_text(sum(g.compute_seconds for g in s.graphs))),
        ("compile time (measured)", lambda s: f"{s.compile_seconds:.2f} s"),
    ]
    for name, of in rows:
        table.add_row(name, *(of(side) for side in sides))
    return table


def _phase_bytes(side: Side, phase: str) -> int:
    return next((total.bytes for total in side.totals.by_phase if total.name == phase), 0)


def _break(this: GraphBreak) -> Text:
    what = "error" if this.error else "graph break"
    text = Text()
    text.append(f"{what} [{this.cause}] {this.title}", style="bold red")
    text.append(f"  ({this.count} times)\n" if this.count > 1 else "\n")
    first = this.source.line - len(this.source.before)
    text.append(f"  {this.source.file}:{this.source.line}\n", style="cyan")
    for number, line in enumerate((*this.source.before, this.source.code, *this.source.after), first):
        here = number == this.source.line
        code = line if not here else _indent(this.source) + line
        text.append(f"  {'>' if here else ' '} {number:5} {code}\n", style="bold" if here else "dim")
    text.append(f"  called: {this.called[:200]}\n  why: {this.why}\n  instead: {this.instead}\n  breaks under: {this.breaks_under}\n")
    if this.graphs:
        text.append(
            f"  splits the function into {this.graphs} graphs, with {this.collectives_before} collectives before it and "
            f"{this.collectives_after} behind\n"
        )
    if this.cause == "unknown":
        text.append(f"  Dynamo says: {this.message[:600]}\n")
    return text


def _indent(source: Source) -> str:
    """The indentation of the line itself, guessed from its neighbours where its code was stripped."""
    neighbours = [line for line in (*source.before[::-1], *source.after) if line.strip()]
    return " " * (len(neighbours[0]) - len(neighbours[0].lstrip())) if neighbours else ""


def _redistributions(rows: Sequence[Redistribution], most: int | None, terminal: bool) -> Table:
    table = _table("redistributions", terminal, "line", "module", "why", "change", "shape", "plan", "bytes", "time", "exposed", "")
    order = sorted(rows, key=lambda r: (-r.exposed_seconds, -r.bytes_before))
    for r in order[:most]:
        bytes_ = f"{r.bytes:,}" if r.bytes == r.bytes_before else f"{r.bytes_before:,} -> {r.bytes:,}"
        fate = "" if r.fate == "sent" else f"{r.fate} by {r.decided_by}" if r.decided_by else r.fate
        cells = (
            _line(r.source), r.module, "asked for" if r.explicit else f"for {r.operator}", f"{r.before}->{r.after} {r.phase}",
            f"{list(r.shape)} {r.dtype}", ", ".join(step.split(" ")[0] for step in r.plan), bytes_, seconds_text(r.seconds),
            seconds_text(r.exposed_seconds), fate,
        )  # fmt: skip
        table.add_row(*map(escape, cells))
    return _cut(table, len(order), most)


def _totals(title: str, totals: Sequence[Total], most: int | None, terminal: bool) -> Table:
    table = _table(title, terminal, "", "collectives", "bytes", "time", "exposed")
    for column in table.columns[1:]:
        column.justify = "right"
    for t in totals[:most]:
        table.add_row(escape(t.name), str(t.count), f"{t.bytes:,}", seconds_text(t.seconds), seconds_text(t.exposed_seconds))
    return _cut(table, len(totals), most)


def _decisions(title: str, rows: Sequence[DecisionRow], most: int | None, terminal: bool) -> Iterator[Table]:
    if not rows:
        return
    table = _table(title, terminal, "what", "line", "change", "why")
    for row in rows[:most]:
        change = f"{row.before} -> {row.after}" if row.before != row.after else row.before
        table.add_row(*map(escape, (row.kind, _line(row.source), change, row.reason)))
    yield _cut(table, len(rows), most)


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
    return f"{_place(source)} {source.code}" if source.file else "-"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
