"""Runs the catalogue of distributed programs for stock and for this backend, prints both columns and writes
docs/coverage.md.

    python tools/corpus.py [--corpus ../shared/corpus] [--only REGEX] [--stock RUN.json] [--aot RUN.json] [--inductor
    RUN.json]

A run of all 486 programs takes about 10 minutes on two cores with AOTAutograd alone (`aot_eager` against
`dtensor_aten`) and half an hour through Inductor (`dtensor`). Finished runs are given with the options; without them
they are made."""

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
#: What is run and compared, and its backend.
BACKENDS = {"stock": "aot_eager", "aot": "dtensor_aten", "inductor": "dtensor"}
#: Name of each program to its category and verdict.
Verdicts = dict[str, tuple[str, str]]
#: Verdicts in the order of the tables; the first is the one to have.
VERDICTS = ("PASS", "BREAK", "ERROR", "HANG/DIED", "WRONG", "ERROR-BWD", "BOTH-ERR", "LENIENT")
#: Why a program that still fails does: name of the program, or cause of the catalogue's own table -> reason.
REASONS = {
    "tp_parallelize_inside_compile": "a module with parameters, made and parallelized in the region: Dynamo makes no "
    "parameter inside a"
    " graph; right results, two breaks",
    "ops_equal_allclose": "branches on a value of the data (torch.equal is part of the graph): right results, one "
    "break",
    "G02": "depends on data by nature (a branch on a value, memory that is exchanged): right results, one break",
    "R13": "objects of other ranks exist only when the program runs: right results, one break, with its cause",
    "R30": "the program calls torch.export, which asks no backend; `dtensor_compile.export` exports such models",
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


def judge(rows: list[dict[str, Any]], judge_row: Any) -> Verdicts:
    """The verdicts of a run; those of a run that was judged before stand."""
    return {row["name"]: (row["category"], row.get("verdict") or judge_row(row)) for row in rows}


def coverage(stock: Verdicts, aot: Verdicts, inductor: Verdicts, roots: dict[str, str]) -> str:
    """Text of docs/coverage.md."""
    lines = [
        "# Coverage",
        "",
        f"The catalogue of distributed programs ({len(aot)} here): stock torch {torch.__version__} (`aot_eager`) "
        "against this backend, with",
        "AOTAutograd alone (`dtensor_aten`) and through Inductor (`dtensor`). `tools/corpus.py` writes this file. Each "
        "program runs eager",
        "and compiled on two gloo ranks, three calls, forward and backward; PASS means one graph, and values, "
        "gradients and mutated inputs",
        "equal to eager's.",
        "",
        "| | " + " | ".join(VERDICTS) + " |",
        "|---|" + "---|" * len(VERDICTS),
    ]
    for name, verdicts in (("stock", stock), ("ours, AOTAutograd alone", aot), ("ours, through Inductor", inductor)):
        count = collections.Counter(verdict for program, (_, verdict) in verdicts.items() if program in aot)
        lines.append(f"| {name} | " + " | ".join(str(count[v]) for v in VERDICTS) + " |")
    lines += [
        "",
        "## Programs that do not pass",
        "",
        "| program | category | cause | stock | AOT | Inductor | reason |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    fine = ("PASS", "BOTH-ERR", "LENIENT")
    for program, (category, verdict) in sorted(aot.items(), key=lambda item: (item[1][0], item[0])):
        before, through = (side.get(program, ("", "?"))[1] for side in (stock, inductor))
        if verdict not in fine or through not in fine:
            root = roots.get(program, "")
            reason = REASONS.get(program) or REASONS.get(root, "not done yet")
            lines.append(f"| {program} | {category} | {root} | {before} | {verdict} | {through} | {reason} |")
    lenient = sorted(program for program, (_, verdict) in aot.items() if verdict == "LENIENT")
    lines += ["", "## Programs that eager refuses and that run compiled", "", *(f"- {program}" for program in lenient)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=pathlib.Path, default=ROOT.parent / "shared" / "corpus")
    parser.add_argument("--only")
    for side in BACKENDS:
        parser.add_argument(f"--{side}", type=pathlib.Path)
    args = parser.parse_args()
    if not (args.corpus / "run_corpus.py").exists():
        sys.exit(f"no catalogue at {args.corpus}: give its folder with --corpus")
    judge_row = load_verdicts(args.corpus).verdict
    sides: dict[str, Verdicts] = {}
    for side, backend in BACKENDS.items():
        path = getattr(args, side)
        sides[side] = judge(json.loads(path.read_text()) if path else run(args.corpus, backend, args.only), judge_row)
    known = json.loads((args.corpus / "stock_2_13.json").read_text())
    roots = {row["name"]: row.get("root") or "" for row in known}

    table = Table(title="programs that pass")
    for column in ("category", "programs", *BACKENDS):
        table.add_column(column, justify="left" if column == "category" else "right")
    categories = collections.Counter(category for category, _ in sides["aot"].values())
    for category, number in [*categories.items(), ("all", len(sides["aot"]))]:
        passed = [
            sum(v == "PASS" and category in (c, "all") for c, v in verdicts.values()) for verdicts in sides.values()
        ]
        table.add_row(category, str(number), *map(str, passed))
    Console().print(table)
    if not args.only:
        (ROOT / "docs").mkdir(exist_ok=True)
        (ROOT / "docs" / "coverage.md").write_text(coverage(sides["stock"], sides["aot"], sides["inductor"], roots))


if __name__ == "__main__":
    main()
