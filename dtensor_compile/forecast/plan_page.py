"""Plans as self-contained HTML pages: memory over time and the timeline of one, and the plans of a sweep as points that
can be clicked.

Input: a `StepPlan`, or those of a sweep. Output: text. The charts are plotly's, whose script is part of the page; a
content security policy forbids every load.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from dtensor_compile.errors import OfflineError
from dtensor_compile.forecast.plan_table import size_text, text_of, why_not
from dtensor_compile.forecast.step_plan import StepPlan
from dtensor_compile.forecast.sweep import Swept
from dtensor_compile.forecast.timeline import COMPUTE, StepSpan, merged
from dtensor_compile.report.compare_reports import seconds_text as seconds
from dtensor_compile.report.templates import template

#: Spans of one module closer than this fraction of the step are one bar.
CLOSE = 1e-4
#: Colours of kinds of memory, and of streams, in their order: the qualitative scheme of P. Tol (2021).
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#332288", "#ddcc77")


def to_html(plan: StepPlan) -> str:
    """The page of one plan.

    Raises:
        OfflineError: plotly is not installed.
    """
    return _render(_chart(_step_figure(plan), "step"), [(plan.target, plan)])


def sweep_to_html(swept: Sequence[Swept]) -> str:
    """The page of a sweep; a click on a point shows its plan.

    Raises:
        OfflineError: plotly is not installed.
    """
    plans = [(text_of(this), this.plan) for this in swept if this.plan is not None]
    failed = [(text_of(this), this.failed) for this in swept if this.plan is None]
    return _render(_chart(_sweep_figure(swept), "sweep"), plans, failed)


def require_plotly() -> Any:
    """plotly's objects and its function for several charts.

    Raises:
        OfflineError: it is not installed.
    """
    try:
        import plotly.graph_objects as graph
        from plotly.subplots import make_subplots
    except ImportError:
        raise OfflineError("pages of plans need plotly: pip install 'dtensor_compile[pages]'") from None
    return graph, make_subplots


def _render(chart: str, plans: Sequence[tuple[str, StepPlan]], failed: Sequence[tuple[str, str]] = ()) -> str:
    page = template("dtensor_compile.forecast", "plan.html.j2")
    return page.render(chart=chart, plans=plans, failed=failed, size=size_text, seconds=seconds)


def _chart(figure: Any, name: str) -> str:
    options = {"displaylogo": False, "responsive": True}
    text: str = figure.to_html(include_plotlyjs=True, full_html=False, div_id=name, config=options)
    return text


def _step_figure(plan: StepPlan) -> Any:
    graph, make_subplots = require_plotly()
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.06)
    at = [1e3 * point.seconds for point in plan.memory.over_time]
    for number, kind in enumerate(plan.memory.kinds):
        held = [point.bytes[number] / 2**30 for point in plan.memory.over_time]
        if any(held):
            line = {"shape": "hv", "width": 0.5, "color": COLOURS[number % len(COLOURS)]}
            area = graph.Scatter(x=at, y=held, name=kind, stackgroup="memory", line=line, legendgroup="memory")
            figure.add_trace(area, row=1, col=1)
    spans, gap = list(plan.timeline.spans()), round(CLOSE * plan.time.step * 1e9)
    for number, stream in enumerate(plan.timeline.streams):
        bars = merged([span for span in spans if span.stream == stream], _same, gap)
        bar = graph.Bar(
            base=[group[0].start / 1e6 for group in bars],
            x=[(group[-1].start + group[-1].duration - group[0].start) / 1e6 for group in bars],
            y=[stream] * len(bars),
            hovertext=list(map(_about, bars)),
            hoverinfo="text",
            orientation="h",
            marker={"color": COLOURS[number % len(COLOURS)], "line": {"width": 0.3, "color": "white"}},
            showlegend=False,
        )
        figure.add_trace(bar, row=2, col=1)
    figure.update_layout(height=720, barmode="overlay", margin={"l": 90, "r": 20, "t": 20, "b": 40})
    figure.update_yaxes(title_text="GiB", row=1, col=1)
    figure.update_yaxes(autorange="reversed", row=2, col=1)
    figure.update_xaxes(title_text="ms", range=[0, 1e3 * plan.time.step], row=2, col=1)
    return figure


def _same(span: StepSpan) -> object:
    return (span.module, span.where) if span.stream == COMPUTE else span  # collectives stay apart


def _about(group: Sequence[StepSpan]) -> str:
    first = group[0]
    took = sum(span.duration for span in group) / 1e9
    names = list(dict.fromkeys(span.name for span in group))
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
    lines = [shown, first.module, first.where, seconds(took) + (f", {len(group)} kernels" if group[1:] else "")]
    if first.exposed:
        lines.append(f"{seconds(first.exposed / 1e9)} exposed")
    return "<br>".join(html.escape(line) for line in lines if line)


def _sweep_figure(swept: Sequence[Swept]) -> Any:
    graph, _ = require_plotly()
    known = list(enumerate(this for this in swept if this.plan is not None))
    figure = graph.Figure()
    for fits, name, colour in ((True, "fits", COLOURS[2]), (False, "does not fit", COLOURS[1])):
        those = [(number, this, this.plan) for number, this in known if this.plan and this.plan.memory.fits == fits]
        point = graph.Scatter(
            x=[plan.memory.needed / 2**30 for _, _, plan in those],
            y=[1e3 * plan.time.step if not plan.tokens else 1e6 * this.seconds for _, this, plan in those],
            customdata=[number for number, _, _ in those],
            text=[html.escape(text_of(this)) for _, this, _ in those],
            hovertext=[
                html.escape(text_of(this) + ("" if fits else f": {why_not(plan.memory)}")) for _, this, plan in those
            ],
            hoverinfo="text",
            mode="markers+text",
            textposition="top center",
            marker={"size": 12, "color": colour},
            name=name,
        )
        figure.add_trace(point)
    plans = [this.plan for _, this in known if this.plan is not None]
    if plans:
        figure.add_vline(x=plans[0].memory.capacity / 2**30, line_dash="dot", annotation_text="capacity")
    unit = "us a token of the job" if any(plan.tokens for plan in plans) else "ms a step"
    figure.update_layout(
        height=520, xaxis_title="GiB needed", yaxis_title=unit, margin={"l": 90, "r": 20, "t": 20, "b": 40}
    )
    return figure
