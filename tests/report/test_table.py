"""The report in a terminal: what its first screen says agrees with what stands below it."""

import io
import re

import pytest
import torch
from rich.console import Console

from dtensor_compile.recording.recorder import record
from dtensor_compile.report.html import to_html
from dtensor_compile.report.model import Report
from dtensor_compile.report.table import print_report


def text_of(report: Report) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=200, color_system=None), everything=True)
    return out.getvalue()


def cell(report: Report, name: str) -> str:
    """What the first screen says of our side in the line `name`."""
    return re.search(rf"^[| ]*{name} +\|? *(.*?) *[|]?$", text_of(report), re.M)[1]


def break_in_a_layer(layer, x):
    return layer(layer(layer(x)))


def one_break(layer, x):
    torch._dynamo.graph_break()
    return x + 1


def no_break(layer, x):
    return x + 1


class Layer(torch.nn.Module):
    def forward(self, x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


@pytest.mark.parametrize("program, places", [(break_in_a_layer, 1), (one_break, 1), (no_break, 0)])
@pytest.mark.parametrize("backend", ["dtensor_aten", "eager"])
def test_graph_breaks_of_the_first_screen_are_those_of_the_list(program, places, backend):
    torch._dynamo.reset()
    with record(others=True) as recording:
        torch.compile(program, backend=backend)(Layer(), torch.ones(2))
    report, met = recording.report(), len(recording.breaks)
    text, page = text_of(report), to_html(report)
    assert text.count("graph break [") == places == len(report.ours.breaks)
    assert sum(map(int, re.findall(r"\(met (\d+) times\)", text))) == (met if met > places else 0)
    expected = f"{places}, met {met} times" if met > places else str(places)
    assert (met > places) == (program is break_in_a_layer)
    assert cell(report, "graph breaks") == expected
    assert re.search(r"<dt>graph breaks</dt>\s*<dd class=\"now\">(.*?)</dd>", page)[1] == expected
