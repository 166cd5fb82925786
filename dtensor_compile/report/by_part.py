"""The gain of compiling a model as a whole whose parts are compiled one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtensor_compile.report.compare_reports import bytes_text, exposed_text, seconds_text
from dtensor_compile.report.model import DecisionRow, Side, Source

#: Kind of the decision.
BY_PART = "compiled_by_part"


def compared_with_whole(ours: Side, whole: Side, parts: Sequence[str]) -> Side:
    """`ours` with a row at the head of its missed optimizations: the difference of `whole` in bytes and exposed
    time."""
    names = ", ".join((*parts[:2], "...") if len(parts) > 2 else parts)
    row = DecisionRow(BY_PART, Source(), _differences(ours, whole), f"parts {names}", "one graph")
    return replace(ours, missed=(row, *ours.missed))


def _differences(ours: Side, whole: Side) -> str:
    if whole.failed:
        return f"as a whole it does not compile: {whole.failed}"
    now, then = ours.totals.all, whole.totals.all
    collectives = f"{now.count} collectives become {then.count}"
    sent = f"{bytes_text(now.bytes)} become {bytes_text(then.bytes)}"
    exposed = f"exposed communication, {exposed_text(ours)}, becomes {seconds_text(then.exposed_seconds)}"
    if ours.outside is None:
        return f"as a whole it sends {bytes_text(then.bytes)}; what runs between the parts is not known"
    if now.count <= then.count and now.bytes <= then.bytes and now.exposed_seconds <= then.exposed_seconds:
        return f"as a whole it would gain nothing: {collectives}, {sent}"
    return f"between the parts nothing is planned or hidden; as a whole, {collectives}, {sent}, {exposed}"
