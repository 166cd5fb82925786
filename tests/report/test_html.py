"""The report as an HTML file and as a trace: what is in them, that they load nothing, and that the page works in a
browser.
"""

import dataclasses
import html
import json
import pathlib
import re
import shutil
import subprocess

import pytest

from dtensor_compile.recording.recorder import Recording
from dtensor_compile.report import report_command as command
from dtensor_compile.report.build import build_report
from dtensor_compile.report.chrome_trace import THREADS, to_trace
from dtensor_compile.report.excerpts import AROUND, excerpts
from dtensor_compile.report.html import to_html
from dtensor_compile.report.model import Report, Source, from_json, to_json
from tests.report.large import large_report
from tests.report.samples import LINE, sample_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")

#: What must never be read as markup, in the places where text of the program stands.
MARKUP = "</script><script>alert(1)</script><!--<b>&amp;"


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def with_markup() -> Report:
    """The sample with markup wherever a program could put it."""
    report = sample_report()
    line = dataclasses.replace(LINE, code=MARKUP, before=(MARKUP,), after=(MARKUP,))

    def on_line(rows):
        return tuple(dataclasses.replace(row, source=line) for row in rows)

    ours = report.ours
    breaks = tuple(dataclasses.replace(b, called=MARKUP, message=MARKUP) for b in on_line(ours.breaks))
    redistributions = tuple(dataclasses.replace(r, module=MARKUP) for r in on_line(ours.redistributions))
    collectives = tuple(dataclasses.replace(c, module=MARKUP) for c in on_line(ours.collectives))
    ours = dataclasses.replace(ours, breaks=breaks, redistributions=redistributions, collectives=collectives)
    return dataclasses.replace(report, target=MARKUP, ours=ours)


class TestPage:
    def test_holds_every_redistribution_and_every_break(self):
        report = sample_report()
        data = data_of(to_html(report))
        texts, columns = data["texts"], data["sides"][0]["redistributions"]["columns"]
        assert [texts[i] for i in columns["t:plan"]] == ["\n".join(r.plan) for r in report.ours.redistributions]
        assert [texts[i] for i in columns["t:fate"]] == [r.fate for r in report.ours.redistributions]
        assert columns["n:bytes_before"] == [r.bytes_before for r in report.ours.redistributions]
        assert columns["d:exposed_seconds"] == [round(r.exposed_seconds * 1e9) for r in report.ours.redistributions]
        sources = data["sources"]["columns"]
        for kind in ("redistributions", "breaks"):
            rows = getattr(report.ours, kind)
            places = data["sides"][0][kind]["columns"]["s:source"]
            found = [(texts[sources["t:file"][i]], sources["n:line"][i]) for i in places]
            assert found == [(r.source.file, r.source.line) for r in rows]
        causes = data["sides"][0]["breaks"]["columns"]
        assert [texts[i] for i in causes["t:instead"]] == [b.instead for b in report.ours.breaks]

    def test_both_sides_stand_at_the_top(self):
        page = to_html(sample_report())
        now, than = '<dd class="now">1,000</dd>', '<dd class="than">stock 2,000 <b class="better">-50.0%'
        assert re.search(rf"<dt>bytes sent</dt>\s*{now}\s*{than}", page)
        assert data_of(page)["sides"][1]["name"] == "stock"

    def test_without_stock(self):
        page = to_html(sample_report(stock=False))
        assert 'class="than"' not in page and len(data_of(page)["sides"]) == 1

    def test_of_nothing(self):
        data = data_of(to_html(build_report(Recording())))
        assert data["files"] == [] and data["sides"][0]["spans"]["length"] == 0

    def test_loads_nothing(self):
        page = to_html(sample_report())
        assert not re.search(
            r"https?://|//cdn|@import|url\(|<link|<img|<iframe|\bsrc=|\bimport\(|\bfetch\(|XMLHttpRequest", page
        )
        assert "default-src 'none'" in page

    def test_text_of_the_program_is_escaped(self):
        page = to_html(with_markup())
        assert "<script>alert" not in page and "<!--<b>" not in page
        assert page.count("</script>") == 2
        data = data_of(page)
        assert MARKUP in data["texts"]
        assert html.escape(MARKUP) in page

    def test_of_80_layers_is_under_5_megabytes(self):
        assert len(to_html(large_report(80)).encode()) < 5_000_000

    def test_of_a_report_that_was_saved_is_the_same(self):
        report = sample_report()
        assert to_html(from_json(to_json(report))) == to_html(report)


PROGRAM = '''\
"""A module."""

def short(x):
    a = x + 1
    return a

def long(x):
''' + "".join(f"    x = x + {i}\n" for i in range(60)) + "    return x\n"  # fmt: skip


class TestExcerpts:
    @pytest.fixture
    def file(self, tmp_path: pathlib.Path) -> str:
        (tmp_path / "program.py").write_text(PROGRAM)
        return str(tmp_path / "program.py")

    def test_a_short_function_is_whole_and_ends_there(self, file):
        (excerpt,) = excerpts([Source(file, 4, "a = x + 1")])[file]
        assert (excerpt.first, excerpt.lines) == (3, ("def short(x):", "    a = x + 1", "    return a"))

    def test_of_a_long_function_a_window(self, file):
        (excerpt,) = excerpts([Source(file, 40, "x = x + 32")])[file]
        assert (excerpt.first, len(excerpt.lines)) == (40 - AROUND, 2 * AROUND + 1)

    def test_windows_that_touch_are_one(self, file):
        parts = excerpts([Source(file, 30, ""), Source(file, 34, ""), Source(file, 4, "")])[file]
        assert [part.first for part in parts] == [3, 30 - AROUND]

    def test_a_file_that_has_changed_is_not_trusted(self, file):
        for line in (4, 6):  # another line stands there; an empty one
            (excerpt,) = excerpts([Source(file, line, "was_there()", ("def old():",), ("return",))])[file]
            assert (excerpt.first, excerpt.lines) == (line - 1, ("def old():", "was_there()", "return"))

    def test_a_file_that_cannot_be_read(self):
        (excerpt,) = excerpts([LINE])[LINE.file]
        assert (excerpt.first, excerpt.lines[2]) == (LINE.line - 2, LINE.code)

    def test_lines_that_are_not_known_are_left_out(self):
        assert excerpts([Source()]) == {}


def test_the_command_writes_both(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "report_target", lambda *args, **kwargs: sample_report())
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert command.main(["model.py:build", "--html", str(page), "--trace", str(trace)]) == 0
    assert page.read_text(encoding="utf-8") == to_html(sample_report())
    assert trace.read_text(encoding="utf-8") == to_trace(sample_report())
    assert "graph breaks" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_one_clear_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "report_target", lambda *args, **kwargs: sample_report())
    assert command.main(["model.py:build", "--html", str(tmp_path / "none" / "report.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


class TestTrace:
    def test_streams_are_threads_and_times_are_microseconds(self):
        events = json.loads(to_trace(sample_report()))["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert [names[1, i] for i in range(len(THREADS))] == list(THREADS)
        assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"dtensor", "stock"}
        gather = next(e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["name"] == "all_gather[tp]")
        assert names[1, gather["tid"]] == "communication"
        assert (gather["ts"], gather["dur"], gather["args"]["bytes"]) == (0.0, 2000.0, 1000)
        assert gather["args"]["line"] == "/user/model.py:12" and gather["args"]["plan"] == ["all_gather[tp] S(0)->R"]
        assert gather["args"]["why"] == "for aten.mm.default"

    def test_what_compute_waits_for_ends_with_its_collective(self):
        events = json.loads(to_trace(sample_report()))["traceEvents"]
        waits = next(e for e in events if e["name"] == "waits for all_gather[tp]" and e["pid"] == 1)
        assert (waits["ts"], waits["dur"]) == (1000.0, 1000.0)

    def test_spans_of_a_stream_do_not_overlap(self):
        events = [e for e in json.loads(to_trace(large_report(8)))["traceEvents"] if e["ph"] == "X"]
        for stream in {(e["pid"], e["tid"]) for e in events}:
            spans = sorted(
                (round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in events if (e["pid"], e["tid"]) == stream
            )
            assert all(start + length <= following for (start, length), (following, _) in zip(spans, spans[1:]))

    def test_graphs_follow_each_other(self):
        report = sample_report(stock=False)
        report = dataclasses.replace(report, ours=dataclasses.replace(report.ours, graphs=report.ours.graphs * 2))
        graphs = [e for e in json.loads(to_trace(report))["traceEvents"] if e.get("cat") == "graphs"]
        assert [(e["ts"], e["dur"]) for e in graphs] == [(0.0, 2000.0), (2000.0, 2000.0)]


def opened(page: str, folder: pathlib.Path, state: str = "", *flags: str) -> str:
    """The page's document after its script has run; fails on any message in the console."""
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=5000", *flags,
            "--dump-dom", file.as_uri() + state,
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    assert 'class="failure" role' not in done.stdout
    assert re.search(r'data-opened-ms="\d+"', done.stdout), done.stderr[-2000:]
    return done.stdout


#: Does what a user does, and leaves in the document what came of it.
ACTIONS = """\
<script>
const get = (selector) => document.querySelector(selector), seen = {}, canvas = get("canvas");
const key = (name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
const header = (name) => get(`#redistributions th[data-column="${name}"]`);
const sort = () => {
    header("captured").querySelector("button").click();
    return header("captured").getAttribute("aria-sort");
};
seen.sorted = [sort(), sort()];
seen.first = get("#redistributions tbody tr").children[header("captured").cellIndex].textContent;
const search = get("#redistributions input[type=search]");
search.value = "block1 BACKWARD";
search.dispatchEvent(new Event("input"));
seen.found = get("#redistributions .count").textContent;
const before = canvas.toDataURL();
for (const name of ["n", "e", "n", "+", "ArrowRight"]) key(name);
seen.zoomed = canvas.toDataURL() !== before;
seen.chosen = get(".detail h3").textContent;
seen.facts = [...document.querySelectorAll(".detail dt")].map((term) => term.textContent);
key("0");
const box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 110 }));
seen.tip = !get("#tip").hidden && get("#tip").textContent;
const place = get("#collectives tbody .place");
place.click();
seen.place = place.textContent;
seen.line = get("tr.flash .at").textContent;
seen.focus = document.activeElement.tagName;
[...document.querySelectorAll("#bytes button")].find((button) => button.textContent === "phase").click();
seen.bars = [...document.querySelectorAll(".bars .name")].map((name) => name.textContent).sort().reverse();
[...document.querySelectorAll("nav button")].find((button) => button.textContent === "stock").click();
seen.stock = document.querySelectorAll("#redistributions tbody tr").length;
document.body.dataset.seen = JSON.stringify(seen);
</script>
"""


def driven(report: Report, folder: pathlib.Path) -> dict:
    """What `ACTIONS` saw on the page of a report."""
    document = opened(to_html(report).replace("</body>", ACTIONS + "</body>"), folder)
    found = re.search(r'data-seen="([^"]*)"', document)
    assert found, "the actions did not end"
    return json.loads(html.unescape(found[1]))


def rows(document: str, table: str) -> list[str]:
    """Text of each row of one table of the document."""
    body = re.search(rf'<section id="{table}".*?</section>', document, re.S)[0]
    found = re.findall(r"<tr[ >].*?</tr>", body.partition("<tbody>")[2], re.S)
    return [html.unescape(re.sub(r"<[^>]*>", " ", row.replace("<wbr>", ""))) for row in found]


@needs_browser
class TestInTheBrowser:
    @pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
    def test_opens(self, scheme, tmp_path):
        document = opened(to_html(sample_report()), tmp_path, "", f"--blink-settings=preferredColorScheme={scheme}")
        (cause,) = rows(document, "breaks")
        assert "value-of-data" in cause and "Keep it a tensor." in cause and "return y" in cause
        assert len(rows(document, "redistributions")) == 2
        assert "size mismatch at index 0" in rows(document, "recompiles")[0]
        assert "its result is waited for at once" in rows(document, "missed")[0]
        assert [re.findall(r"Dynamo|order_rows", row)[:1] for row in rows(document, "stages")] == [
            ["Dynamo"],
            ["order_rows"],
        ]
        assert "blocks.0" in rows(document, "layers")[0]

    def test_searches_and_sorts_as_its_address_says(self, tmp_path):
        page = to_html(large_report(4))
        document = opened(
            page, tmp_path, "#redistributions.q=block1+backward&redistributions.sort=bytes&redistributions.each=1"
        )
        found = rows(document, "redistributions")
        assert len(found) == 4 * 2 and all("block1" in row and "backward" in row for row in found)
        sizes = [float(re.search(r"([\d.]+) MB", row)[1]) for row in found]
        assert sizes == sorted(sizes)
        assert "8 of 64 rows" in document

    def test_equal_layers_are_one_row(self, tmp_path):
        document = opened(to_html(large_report(4)), tmp_path, "#redistributions.sort=-bytes")
        found = rows(document, "redistributions")
        assert len(found) == 16 and all("layers.*." in row and row.split()[0] == "4" for row in found)
        assert "64 rows in 16" in document

    def test_shows_the_side_that_its_address_names(self, tmp_path):
        document = opened(to_html(large_report(2)), tmp_path, "#side=stock")
        assert not rows(document, "redistributions") and rows(document, "collectives")

    def test_source_has_its_costs_in_the_margin(self, tmp_path):
        document = opened(to_html(sample_report()), tmp_path)
        (line,) = [row for row in rows(document, "source") if "x.redistribute" in row]
        assert line.split()[:6] == ["1.00", "kB", "2.00", "ms", "1.00", "ms"] and "breaks: value-of-data" in line

    def test_answers_to_mouse_and_keyboard(self, tmp_path):
        seen = driven(large_report(2), tmp_path)
        assert seen["sorted"] == ["descending", "ascending"] and seen["first"] == "2.00 MB"
        assert seen["found"].startswith("4 of 32 rows")
        assert re.fullmatch(r"(all_gather|reduce_scatter)\[tp\]", seen["chosen"]) and "bytes" in seen["facts"]
        assert seen["tip"] and seen["zoomed"]
        assert seen["place"] == f"model.py:{seen['line']}" and seen["focus"] == "TR"
        assert seen["bars"] == ["forward", "backward"]
        assert seen["stock"] == 0

    def test_markup_stays_text(self, tmp_path):
        document = opened(to_html(with_markup()), tmp_path)
        assert "<script>alert" not in document.replace("\\u003c", "") and MARKUP in html.unescape(document)
        assert any(MARKUP in row for row in rows(document, "redistributions"))

    def test_an_error_on_the_page_is_not_overlooked(self, tmp_path):
        with pytest.raises(AssertionError, match="CONSOLE"):
            opened(
                to_html(sample_report()).replace("</body>", "<script>throw new Error('made')</script></body>"), tmp_path
            )

    def test_a_report_of_nothing_opens(self, tmp_path):
        assert "each function is one graph" in opened(to_html(build_report(Recording())), tmp_path)
