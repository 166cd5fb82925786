"""The size of a report's HTML file, and how long a browser takes to open it.

    python tools/bench/report_html.py [--layers 80] [--repeats 3] [--report FILE]

Without `--report` the report is a made one, with as many rows as a step of so many layers has on a 2-D mesh, under this
backend and under stock. Needs Chromium. The time is the page's own: from the start of the navigation until all is there
and laid out."""

from __future__ import annotations

import argparse
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from dtensor_compile.report.html import to_html
from dtensor_compile.report.model import from_json
from tests.report.large import large_report


def open_seconds(browser: str, file: pathlib.Path, profile: str) -> float:
    """Seconds that the page says it took to open, in real time."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--timeout=20000"]
    flags.append(f"--user-data-dir={profile}")
    command = [browser, *flags, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    opened = re.search(r'data-opened-ms="(\d+)"', done.stdout)
    if opened is None:
        raise SystemExit(f"the page did not open: {done.stderr[-500:]}")
    return int(opened[1]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--report", type=pathlib.Path, help="a report as JSON, instead of a made one")
    args = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    report = from_json(args.report.read_text()) if args.report else large_report(args.layers)
    began = time.perf_counter()
    page = to_html(report)
    made = time.perf_counter() - began
    spans = sum(len(graph.spans) for side in (report.ours, report.stock) if side for graph in side.graphs)
    rows = f"{spans:,} spans, {len(report.ours.redistributions):,} redistributions"
    print(f"{rows}: {len(page.encode()) / 1e6:.2f} MB, made in {made:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "report.html")
        file.write_text(page, encoding="utf-8")
        seconds = [open_seconds(browser, file, folder) for _ in range(args.repeats)]
    print(f"opens in {statistics.median(seconds):.2f} s (median of {', '.join(f'{s:.2f}' for s in seconds)})")


if __name__ == "__main__":
    main()
