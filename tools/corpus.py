"""Runs the catalogue of distributed programs for stock and for this backend, prints both columns and writes docs/coverage.md.

    python tools/corpus.py [--corpus ../shared/corpus] [--stage aot|inductor] [--only REGEX] [--stock RUN.json] [--ours RUN.json]

A run of all 486 programs takes about 10 minutes on two cores with `--stage aot` and an hour with `--stage inductor`. Finished runs
are given with `--stock` and `--ours`; without them both are made.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = pathlib.Path(__file__).parent.parent
BACKENDS = {"aot": ("aot_eager", "dtensor_aten"), "inductor": ("inductor", "dtensor")}
#: Verdicts in the order of the tables; the first is the one to have.
VERDICTS = ("PASS", "BREAK", "ERROR", "HANG/DIED", "WRONG", "ERROR-BWD", "BOTH-ERR", "LENIENT")
#: Why a program that still fails does: name of the program, or cause of the catalogue's own table -> reason.
REASONS = {
    "ops_equal_allclose": "returns a value of the data to Python: right results, one break",
    "c2_flatten_dense_tensors": "a generic limit of Dynamo, without distributed parts",
    "tp_module_full_backward_hook": "torch traces module backward hooks under compiled autograd only; not done yet",
    "G02": "depends on data by nature (item, tolist, a branch on a value, a parameter made inside): right results, with a break",
    "R07": "AOTAutograd fixes the placement of a gradient that comes in when it compiles; values are right, `.grad` is placed otherwise",
    "R13": "objects of other ranks exist only when the program runs: one break, with its cause",
    "R22": "lengths that only the data decides: right results, with breaks; not done yet",
    "R26": "the mode counts what it sees while it is entered; not done yet",
    "R28": "hooks that torch disables for tracing, or a C++ reducer: right results, with breaks; not done yet",
    "R29": "backward hooks of modules over DTensors under compiled autograd raise; not done yet",
    "R30": "torch.export asks no backend; `dtensor_compile.export` exports such programs",
    "R31": "a generator has no place in a graph, or a loop depends on data; not done yet",
}

def run(corpus: pathlib.Path, backend: str, only: str | None) -> list[dict[str, Any]]:
    """Runs the catalogue under `backend` and returns its rows."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "run.json"
        command = [sys.executable, "run_corpus.py", "--compile-backend", backend, "--json", str(path)]
        command += ["--only", only] if only else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=corpus, check=True, env=environment, stdout=sys.stderr)
        return json.loads(path.read_text())


def load_verdicts(corpus: pathlib.Path) -> ModuleType:
    """The catalogue's own judge."""
    spec = importlib.util.spec_from_file_location("verdicts", corpus / "verdicts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(rows: list[dict[str, Any]], judge_row: Any) -> dict[str, tuple[str, str]]:
    """Name of each program to its category and verdict."""
    return {row["name"]: (row["category"], row.get("verdict") or judge_row(row)) for row in rows}


def coverage(stock: dict[str, tuple[str, str]], ours: dict[str, tuple[str, str]], roots: dict[str, str], stage: str) -> str:
    """Text of docs/coverage.md."""
    lines = [
        "# Coverage",
        "",
        f"The catalogue of distributed programs ({len(ours)} here), stock torch {torch.__version__} against this backend"
        f" ({' against '.join(BACKENDS[stage])}).",
        "`tools/corpus.py` writes this file. Each program runs eager and compiled on two gloo ranks, three calls, forward and backward;",
        "PASS means one graph, and values, gradients and mutated inputs equal to eager's.",
        "",
        "| | " + " | ".join(VERDICTS) + " |",
        "|---|" + "---|" * len(VERDICTS),
    ]
    for name, verdicts in (("stock", stock), ("ours", ours)):
        count = collections.Counter(verdict for program, (_, verdict) in verdicts.items() if program in ours)
        lines.append(f"| {name} | " + " | ".join(str(count[v]) for v in VERDICTS) + " |")
    lines += ["", "## Programs that do not pass", "", "| program | category | cause | stock | ours | reason |", "|---|---|---|---|---|---|"]
    for program, (category, verdict) in sorted(ours.items(), key=lambda item: (item[1][0], item[0])):
        if verdict not in ("PASS", "BOTH-ERR", "LENIENT"):
            root = roots.get(program, "")
            before = stock.get(program, ("", "?"))[1]
            reason = REASONS.get(program) or REASONS.get(root, "not done yet")
            lines.append(f"| {program} | {category} | {root} | {before} | {verdict} | {reason} |")
    lenient = sorted(program for program, (_, verdict) in ours.items() if verdict == "LENIENT")
    lines += ["", "## Programs that eager refuses and that run compiled", "", *(f"- {program}" for program in lenient)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=pathlib.Path, default=ROOT.parent / "shared" / "corpus")
    parser.add_argument("--stage", choices=BACKENDS, default="aot")
    parser.add_argument("--only")
    parser.add_argument("--stock", type=pathlib.Path)
    parser.add_argument("--ours", type=pathlib.Path)
    args = parser.parse_args()
    if not (args.corpus / "run_corpus.py").exists():
        sys.exit(f"no catalogue at {args.corpus}: give its folder with --corpus")
    verdicts = load_verdicts(args.corpus)
    rows = [
        json.loads(path.read_text()) if path else run(args.corpus, backend, args.only)
        for path, backend in zip((args.stock, args.ours), BACKENDS[args.stage])
    ]
    stock, ours = (judge(r, verdicts.verdict) for r in rows)
    known = json.loads((args.corpus / "stock_2_13.json").read_text())
    roots = {row["name"]: row.get("root") or "" for row in known}

    table = Table(title="catalogue of distributed programs")
    for column in ("category", "programs", "stock passes", "ours passes"):
        table.add_column(column, justify="left" if column == "category" else "right")
    categories = collections.Counter(category for category, _ in ours.values())
    passed = {
        id(side): collections.Counter(side[p][0] for p in ours if p in side and side[p][1] == "PASS") for side in (stock, ours)
    }
    for category, number in categories.items():
        table.add_row(category, str(number), str(passed[id(stock)][category]), str(passed[id(ours)][category]))
    table.add_row("all", str(len(ours)), *(str(sum(passed[id(side)].values())) for side in (stock, ours)), style="bold")
    Console().print(table)
    if not args.only:
        (ROOT / "docs").mkdir(exist_ok=True)
        (ROOT / "docs" / "coverage.md").write_text(coverage(stock, ours, roots, args.stage))


if __name__ == "__main__":
    main()
