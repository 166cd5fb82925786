"""Plans as pages and traces."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from dtensor_compile.cli import main
from dtensor_compile.forecast.plan_page import sweep_to_html, to_html
from dtensor_compile.forecast.plan_trace import to_trace
from dtensor_compile.forecast.step_plan import from_json
from dtensor_compile.forecast.sweep import Swept
from dtensor_compile.forecast.timeline import COMPUTE, StepSpan, merged

HERE = "tests.forecast.targets:"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files that one command writes."""
    folder = tmp_path_factory.mktemp("plan")
    named = {name: folder / f"plan.{name}" for name in ("json", "html", "trace")}
    options = [f"--{name}={file}" for name, file in named.items()]
    assert main(["plan", f"{HERE}sharded", "--mesh", "dp=4", "--clip", "1.0", *options]) == 0
    return {name: file.read_text() for name, file in named.items()}


@pytest.fixture(scope="module")
def plan(files):
    return from_json(files["json"])


def test_the_timeline_is_that_of_the_figures(plan):
    spans = list(plan.timeline.spans())
    assert plan.timeline.streams == (COMPUTE, "dp")
    compute = sum(span.duration for span in spans if span.stream == COMPUTE)
    exposed = sum(span.exposed for span in spans if span.stream == "dp")
    assert compute == pytest.approx(1e9 * plan.time.compute, abs=len(spans))
    assert exposed == pytest.approx(1e9 * plan.time.exposed, abs=len(spans))
    for stream in plan.timeline.streams:
        mine = [span for span in spans if span.stream == stream]
        assert all(a.start + a.duration <= b.start for a, b in zip(mine, mine[1:]))
    assert any("targets.py" in span.where for span in spans)


def test_a_trace_has_streams_and_memory(plan, files):
    assert files["trace"] == to_trace(plan)
    events = json.loads(files["trace"])["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(threads.values()) == [COMPUTE, "dp"]
    assert sum(e["ph"] == "X" for e in events) == len(plan.timeline.rows)
    counters = [e for e in events if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in counters) == plan.memory.peak
    assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)


def test_neighbours_of_one_module_are_one_bar():
    spans = [StepSpan(COMPUTE, name, module, "", start, 2, 0) for name, module, start in
             (("a", "m", 0), ("b", "m", 2), ("c", "n", 4), ("d", "n", 100))]  # fmt: skip
    found = merged(spans, lambda span: span.module, 10)
    assert [[span.name for span in group] for group in found] == [["a", "b"], ["c"], ["d"]]


def test_a_page_holds_the_figures_and_loads_nothing(plan, files):
    page = to_html(plan)
    assert page.count("default-src 'none'") == 1 and "<script src" not in page and "<link" not in page
    text = re.sub(r"<script.*?</script>", "", files["html"], flags=re.S)
    assert "Fits" in text and "reduce_scatter" in text and "±" in text
    for basis in plan.rests_on:
        assert basis.figures in text


def swept(plan):
    return [
        Swept({"tp": "2"}, (("dp", 2), ("tp", 2)), plan),
        Swept({"tp": "</script><b>"}, (("dp", 1),), plan),
        Swept({"tp": "3"}, (), failed="3 does not divide <b>4</b>"),
    ]


def test_text_of_the_program_is_escaped(plan):
    page = sweep_to_html(swept(plan))
    assert "</script><b>" not in page and "3 does not divide &lt;b&gt;4" in page


def in_browser(page, script, tmp_path):
    """What an expression gives in the page, once it is loaded."""
    file = tmp_path / "page.html"
    script_of_page = f"<script>addEventListener('load', () => {{ {script} }})</script></body>"
    file.write_text(page.replace("</body>", script_of_page))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return re.search(r"<title>(.*?)</title>", done.stdout)[1]


@pytest.mark.slow
@needs_browser
def test_memory_and_streams_are_drawn(plan, files, tmp_path):
    drawn = "document.title = [document.querySelectorAll('#step .scatterlayer .trace').length, "
    drawn += "document.querySelectorAll('#step .barlayer .trace').length].join(' ')"
    areas, streams = map(int, in_browser(files["html"], drawn, tmp_path).split())
    kinds = [
        kind for number, kind in enumerate(plan.memory.kinds) if any(at.bytes[number] for at in plan.memory.over_time)
    ]
    assert areas == len(kinds) and streams == len(plan.timeline.streams)


@pytest.mark.slow
@needs_browser
def test_a_click_shows_the_plan(plan, tmp_path):
    shown = "[...document.querySelectorAll('section')].filter(s => !s.hidden).map(s => s.id).join(' ')"
    click = f"const before = {shown}; document.getElementById('sweep').emit("
    click += f"'plotly_click', {{points: [{{customdata: 1}}]}}); document.title = before + ' ' + {shown}"
    assert in_browser(sweep_to_html(swept(plan)), click, tmp_path) == "plan-0 plan-1"


def test_a_sweep_has_no_trace(capsys, tmp_path):
    arguments = [f"{HERE}sharded", "--mesh", "dp=4", "--sweep", "dp=4", "--trace", str(tmp_path / "t")]
    assert main(["plan", *arguments]) == 2
    assert "--trace is of one plan" in capsys.readouterr().err


def test_without_plotly_it_is_said_before_anything_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert main(["plan", f"{HERE}missing", "--html", str(tmp_path / "plan.html")]) == 2
    assert "pages of plans need plotly: pip install 'dtensor_compile[pages]'" in capsys.readouterr().err
