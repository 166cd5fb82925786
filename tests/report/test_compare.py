"""What changed between two reports, and the limits of continuous integration."""

import pytest

from dtensor_compile.report.compare_reports import (
    LimitError,
    Limits,
    broken,
    bytes_text,
    check_limits,
    compare,
    seconds_text,
)
from tests.report.samples import sample_report


def test_what_changed():
    comparison = compare(sample_report(1), sample_report(3, breaks=2))
    figures = {c.name: (c.base, c.now) for c in comparison.changes}
    assert figures["bytes sent"] == (1000, 3000) and figures["graph breaks"] == (1, 2)
    assert any("3,000 bytes" in row for row in comparison.came)
    assert any("graph break [value-of-data]" in row for row in comparison.came)
    assert any("1,000 bytes" in row for row in comparison.went)


def test_nothing_changed():
    comparison = compare(sample_report(), sample_report())
    assert comparison.came == comparison.went == () and all(c.base == c.now for c in comparison.changes)


@pytest.mark.parametrize(
    "limits, ok",
    [
        (Limits(), True),
        (Limits(max_breaks="1"), True),
        (Limits(max_breaks="0"), False),
        (Limits(max_bytes="3kB"), True),
        (Limits(max_bytes="2.9kB"), False),
        (Limits(max_bytes="2KiB"), False),
        (Limits(max_exposed="3ms"), True),
        (Limits(max_exposed="2999us"), False),
        (Limits(max_exposed="0.003s"), True),
    ],
)
def test_limits(limits, ok):
    assert (broken(limits, sample_report(3)) == []) == ok


def test_limits_against_a_base():
    assert broken(Limits(max_bytes="+0%", max_breaks="+0%"), sample_report(3), sample_report(3)) == []
    assert broken(Limits(max_bytes="+200%"), sample_report(3), sample_report(1)) == []
    line, offending = broken(Limits(max_bytes="+199%"), sample_report(3), sample_report(1))
    assert line == "--max-bytes +199%: bytes sent 3,000 bytes, at most 2,990 bytes"
    assert offending.endswith(
        "all_gather[tp], forward, /user/model.py:12: y = x.redistribute(placements=[Replicate()])"
    )


def test_a_break_names_its_line():
    _, offending = broken(Limits(max_breaks="0"), sample_report())
    assert "/user/model.py:12: [value-of-data] y = x.redistribute" in offending


@pytest.mark.parametrize(
    "limits",
    [
        Limits(max_bytes="ten"),
        Limits(max_bytes="10ms"),
        Limits(max_exposed="+10ms"),
        Limits(max_breaks="-1"),
        Limits(max_bytes="+0%"),
    ],
)
def test_limits_that_cannot_be_checked(limits):
    with pytest.raises(LimitError):
        check_limits(limits, None)


def test_figures_in_words():
    assert [seconds_text(s) for s in (0.0, 3e-6, 0.0025, 1.5)] == ["0.0 us", "3.0 us", "2.50 ms", "1.50 s"]
    assert bytes_text(1234567) == "1,234,567 bytes"
