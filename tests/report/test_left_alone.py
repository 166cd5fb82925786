"""No cliff, no silence: what a stage leaves alone is a decision with its cost, and the first screen of the report counts it."""

import dataclasses
import io
import re

from rich.console import Console

from dtensor_compile.decisions import Decision
from dtensor_compile.report.build import decision_row, left_alone
from dtensor_compile.report.html import to_html
from dtensor_compile.report.model import from_json, to_json
from dtensor_compile.report.table import print_report
from tests.report.samples import sample_report

#: Left alone by two stages, one of them twice; and something that was done.
DECISIONS = [
    Decision("order_rows", "", "[8, 6] is cut unevenly", left_alone=True, bytes=192),
    Decision("bucket_collectives", "", "sizes are symbolic", left_alone=True, seconds=2e-3),
    Decision("bucket_collectives", "", "sizes are symbolic", left_alone=True, seconds=1e-3),
    Decision("merge_sums", "", "one sum instead of two"),
]


def first_screen(report):
    """The lines of the table at the top, as printed where there is no terminal."""
    out = io.StringIO()
    print_report(report, Console(file=out, width=200, color_system=None), everything=True)
    return out.getvalue()


def line_of(report):
    """The cell of our side in the line ``left alone``."""
    return re.search(r"^[| ]*left alone +\|? *(.*?)[ |]*$", first_screen(report), re.M)[1].split("  ")[0]


def sample(decisions=DECISIONS):
    report = sample_report(stock=False)
    rows = tuple(map(decision_row, decisions))
    return dataclasses.replace(report, ours=dataclasses.replace(report.ours, decisions=rows, left_alone=left_alone(decisions)))


def test_the_first_screen_counts_stages_and_sums_up_costs():
    assert line_of(sample()) == "2 stages, 3.00 ms, 192 bytes"


def test_a_program_of_which_nothing_is_left_alone_says_so():
    assert line_of(sample(DECISIONS[3:])) == "-"


def test_costs_without_an_estimate_are_left_out():
    assert line_of(sample([Decision("capture", "", "torch decides", left_alone=True)])) == "1 stage"


def test_decisions_that_leave_something_alone_come_first_with_their_cost():
    text = first_screen(sample(DECISIONS[::-1]))
    assert "left alone (3.00 ms): sizes are symbolic" in text and "left alone (192 bytes): [8, 6] is cut unevenly" in text
    assert text.index("sizes are symbolic") < text.index("one sum instead of two")


def test_the_page_has_the_figure():
    figures = re.search(r'<dl class="figures">.*?</dl>', to_html(sample()), re.S)[0]
    assert re.search(r"<dt>left alone</dt>\s*<dd class=\"now\">2 stages, 3.00 ms, 192 bytes</dd>", figures)


def test_what_is_left_alone_goes_to_json_and_comes_back():
    report = from_json(to_json(sample()))
    assert report == sample()
    assert [(row.left_alone, row.seconds, row.bytes) for row in report.ours.decisions][0] == (True, None, 192)
