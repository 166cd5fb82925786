"""The report as one self-contained HTML file, rendered by its own script from embedded data.

Input: a `Report`. Output: text. The data are columns of numbers: each text and each line of the program is stored once
in a list and referred to by index, times are integers in nanoseconds. A step of 80 layers has some ten thousand spans
and takes a few megabytes. All text of the program reaches the page as text nodes or escaped, and a content security
policy forbids every load."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import typing
from collections.abc import Sequence
from typing import Any

from dtensor_compile.report.compare_reports import (
    breaks_text,
    exposed_text,
    left_alone_text,
    outside_text,
    seconds_text,
)
from dtensor_compile.report.excerpts import excerpts
from dtensor_compile.report.model import (
    Collective,
    DecisionRow,
    Graph,
    GraphBreak,
    LayerTime,
    Recompile,
    Redistribution,
    Report,
    Side,
    Source,
    Span,
    StageTime,
)
from dtensor_compile.report.templates import template

#: The parts of the page's script, in dependency order.
SCRIPTS = ("data.js", "view.js", "grid.js", "tables.js", "bars.js", "source.js", "timeline.js", "page.js")


def to_html(report: Report) -> str:
    """The report as the text of an HTML file."""
    assets = importlib.resources.files("dtensor_compile.report").joinpath("assets")
    sides = [report.ours, *([report.stock] if report.stock else [])]
    return template("dtensor_compile.report", "page.html.j2").render(
        report=report,
        sides=sides,
        figures=_figures(sides),
        meshes=sorted({r.mesh for r in report.ours.redistributions}),
        data=_script_text(_payload(sides)),
        style=assets.joinpath("page.css").read_text("utf-8"),
        script="\n".join(['"use strict";', *(assets.joinpath(name).read_text("utf-8") for name in SCRIPTS)]),
    )


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number at the top of the page: its text per side, and the change from stock to ours if there are both."""

    name: str
    texts: tuple[str, ...]
    change: str
    better: bool


def _figures(sides: Sequence[Side]) -> list[Figure]:
    def figure(name: str, values: Sequence[float], texts: Sequence[str]) -> Figure:
        ours, stock = values[0], values[-1]
        percent = (ours / stock - 1) * 100 if stock else 0.0
        change = f"{percent:+.1f}%" if abs(percent) >= 0.05 else ""
        return Figure(name, tuple(texts), change, ours < stock)

    def seconds(name: str, values: Sequence[float]) -> Figure:
        return figure(name, values, [seconds_text(value) for value in values])

    totals = [side.totals.all for side in sides]
    return [
        figure("graph breaks", [len(side.breaks) for side in sides], [breaks_text(side.breaks) for side in sides]),
        figure("collectives", [total.count for total in totals], [str(total.count) for total in totals]),
        figure("bytes sent", [total.bytes for total in totals], [f"{total.bytes:,}" for total in totals]),
        Figure("outside of graphs", tuple(outside_text(side.outside) for side in sides), "", False),
        seconds("communication", [total.seconds for total in totals]),
        figure("exposed", [total.exposed_seconds for total in totals], [exposed_text(side) for side in sides]),
        seconds("compute in graphs", [sum(g.compute_seconds * g.calls for g in side.graphs) for side in sides]),
        Figure("left alone", tuple(left_alone_text(side.left_alone) for side in sides), "", False),
    ]


def _script_text(data: Any) -> str:
    """JSON for a script element, escaped so that it cannot end that element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


class _Texts:
    """Texts and lines, each stored once and referred to by index."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.sources: dict[Source, int] = {}

    def text(self, value: str) -> int:
        return self.texts.setdefault(value, len(self.texts))

    def source(self, value: Source) -> int:
        return self.sources.setdefault(value, len(self.sources))


def _payload(sides: Sequence[Side]) -> dict[str, Any]:
    texts = _Texts()
    data: dict[str, Any] = {"sides": [_side(side, texts) for side in sides]}
    files = excerpts(texts.sources)
    data["files"] = [{"name": file, "excerpts": [[e.first, e.lines] for e in parts]} for file, parts in files.items()]
    data["sources"] = _columns(Source, list(texts.sources), texts)
    data["texts"] = list(texts.texts)
    return data


def _side(side: Side, texts: _Texts) -> dict[str, Any]:
    graphs = [dataclasses.replace(graph, spans=()) for graph in side.graphs]
    spans = _columns(Span, [span for graph in side.graphs for span in graph.spans], texts)
    return {
        "name": side.name,
        "breaks": _columns(GraphBreak, side.breaks, texts),
        "recompiles": _columns(Recompile, side.recompiles, texts),
        "redistributions": _columns(Redistribution, side.redistributions, texts),
        "collectives": _columns(Collective, side.collectives, texts),
        "decisions": _columns(DecisionRow, side.decisions, texts),
        "missed": _columns(DecisionRow, side.missed, texts),
        "graphs": _columns(Graph, graphs, texts, skip={"spans"}),
        "stages": _columns(StageTime, side.stages, texts),
        "layers": _columns(LayerTime, side.layers, texts),
        "spans": spans,
        "spans_of_graphs": [len(graph.spans) for graph in side.graphs],
    }


def _columns(
    form: type, rows: Sequence[Any], texts: _Texts, skip: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    """Rows of one dataclass as columns. The first letter of a column gives the type of its values.

    ``t`` a text, by index; ``s`` a line of the program, by index; ``n`` a number, -1 for none; ``d`` a duration or a
    point in time, in nanoseconds, -1 for none; ``b`` a truth value, as 0 or 1.
    """
    hints = typing.get_type_hints(form)
    columns = {}
    for field in dataclasses.fields(form):
        if field.name in skip:
            continue
        hint, values = hints[field.name], [getattr(row, field.name) for row in rows]
        if hint is Source:
            columns[f"s:{field.name}"] = [texts.source(value) for value in values]
        elif hint in (float, float | None):
            columns[f"d:{field.name}"] = [-1 if value is None else round(value * 1e9) for value in values]
        elif hint is bool:
            columns[f"b:{field.name}"] = [int(value) for value in values]
        elif hint in (int, int | None):
            columns[f"n:{field.name}"] = [-1 if value is None else value for value in values]
        else:
            columns[f"t:{field.name}"] = [texts.text(_joined(value)) for value in values]
    return {"length": len(rows), "columns": columns}


def _joined(value: str | tuple[str, ...] | tuple[int, ...]) -> str:
    """Text of a value: a shape as ``4 x 128``; several texts one per line."""
    if isinstance(value, str):
        return value
    return " x ".join(map(str, value)) if all(isinstance(item, int) for item in value) else "\n".join(map(str, value))
