"""Every supported torch release: an environment for each, the tests and the catalogue in it, and ``docs/releases.md``.

    python tools/torch_matrix.py --python python3.11                  # all of it; in ~/.cache/dtensor_compile/releases
    python tools/torch_matrix.py --environments /data/releases --releases 2.14.1 --tests tests/capture tests/lowering
    python tools/torch_matrix.py --existing 2.13.0=.venv              # takes an environment that is there
    python tools/torch_matrix.py --runs 2.14.1=run.json               # and a finished run of the catalogue

An environment is made by ``python -m venv`` and ``pip install`` from the index that pip is configured for; a torch for
CUDA comes without the libraries that it is linked to, which would take several GB (`tools/stub_libraries.py`). What
each release gave is kept in a file beside its environment, so that a release can be run again by itself: the table is
made of all that is there. The catalogue is run where ``../shared/corpus`` is.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import stub_libraries  # noqa: E402 - a tool beside this one

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORPUS = ROOT.parent / "shared" / "corpus"
#: The primary release first.
RELEASES = ("2.13.0", "2.14.1", "2.15.0", "2.11.0")
NEEDED = (
    "setuptools>=77", "wheel", "numpy", "sympy", "networkx>=3", "rich>=13", "jinja2>=3", "scipy>=1.12", "pytest>=8",
    "pytest-timeout", "pytest-xdist", "expecttest", "hypothesis", "jsonschema", "plotly>=6", "filelock", "fsspec",
    "typing-extensions",
)  # fmt: skip
#: Of the catalogue, the one to have first.
VERDICTS = ("PASS", "BREAK", "ERROR", "HANG/DIED", "WRONG", "ERROR-BWD", "BOTH-ERR", "LENIENT", "RUNNER")
#: Looks at every hook of every feature, and builds the C++ part: ranks in tests have limits of time.
_LOOK = """
import importlib, json, pkgutil, platform, warnings
warnings.simplefilter("ignore")
import torch
import dtensor_compile.compat
from dtensor_compile.compat.patches import FEATURES
for module in pkgutil.walk_packages(dtensor_compile.compat.__path__, "dtensor_compile.compat."):
    importlib.import_module(module.name)
features = {name: of.problems() for name, of in FEATURES.items()}
from dtensor_compile.native.loader import native
native()
print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "features": features}))
"""


def make_environment(folder: pathlib.Path, release: str, python: str) -> pathlib.Path:
    """The interpreter of the environment for a release, which is made where it is not there: without the libraries for
    GPUs, in whose place it has stubs.

    Raises:
        subprocess.CalledProcessError: pip cannot install the release for this Python, or gcc cannot make a stub.
    """
    interpreter = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(interpreter), "-m", "pip", "install", "--quiet"]
        free = {**os.environ, "PIP_CONSTRAINT": os.devnull}  # one may pin the primary release
        subprocess.run([*pip, *NEEDED], check=True, env=free)
        subprocess.run([*pip, "--no-deps", f"torch=={release}"], check=True, env=free)
        stub_libraries.stub_missing(folder)
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", str(ROOT)], check=True)  # for its entry points
        done.touch()
    return interpreter


def _environment(folder: pathlib.Path) -> dict[str, str]:
    """Caches of compiled code are those of the release; the package is the one of this tree."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def look(interpreter: pathlib.Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Versions of torch and Python, and per feature what is wrong with its hooks; ``{"error": ...}`` where nothing can
    be imported.
    """
    command = [str(interpreter), "-c", _LOOK]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def count_tests(text: str) -> dict[str, int]:
    """``{"passed": 3, "failed": 1}`` from the output of pytest with ``-rA``-like lines for each test."""
    counts: dict[str, int] = {}
    for outcome in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) ", text, re.MULTILINE):
        counts[outcome.lower()] = counts.get(outcome.lower(), 0) + 1
    return counts


def run_tests(interpreter: pathlib.Path, environment: Mapping[str, str], path: str, seconds: float) -> dict[str, Any]:
    """How many tests of a file or folder have which outcome, and the names of those that do not pass."""
    command = [
        str(interpreter),
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "--tb=no",
        "-rA",
        path,
    ]
    try:
        text = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        return {"counts": {}, "failed": [f"no end after {seconds:.0f} s"]}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return {"counts": count_tests(text), "failed": failed}


def run_catalogue(
    interpreter: pathlib.Path, environment: Mapping[str, str], only: str | None, results: pathlib.Path
) -> None:
    """Runs the catalogue, or those of its programs whose names match `only`, into the file `results`."""
    command = [
        str(interpreter),
        "run_corpus.py",
        "--compile-backend",
        "dtensor_aten",
        "--json",
        str(results.absolute()),
    ]
    subprocess.run(
        [*command, *(["--only", only] if only else [])], cwd=CORPUS, env=environment, check=False, capture_output=True
    )


def judge(results: pathlib.Path) -> dict[str, list[str]]:
    """Each program of a run of the catalogue to its verdict, by the catalogue's own judge, and to what was `seen`."""
    command = [sys.executable, "verdicts.py", str(results.absolute()), "--list", ",".join(VERDICTS)]
    text = subprocess.run(command, cwd=CORPUS, check=True, capture_output=True, text=True).stdout
    verdicts = {name: verdict for verdict, name in re.findall(r"^(\S+) +\S+ +(\S+) +stock ", text, re.MULTILINE)}
    return {of["name"]: [verdicts[of["name"]], seen(of)] for of in json.loads(results.read_text())}


def seen(of: Mapping[str, Any]) -> str:
    """One line about a program of the catalogue that does not pass: a difference, an error or a graph break, without
    paths.
    """
    differs = [text for text in (*(of.get("parity") or ()), of.get("fullgraph_parity")) if text not in ("ok", None)]
    errors = [of[key]["msg"] for key in ("eager_error", "compile_error", "fullgraph_error") if of.get(key)]
    lines = [of.get("crash"), *differs, *errors, of.get("eager_bwd_err"), *(of.get("reasons") or ())]
    text = next((line for line in lines if line and line.strip()), "").strip().splitlines()
    return re.sub(r"(/[\w.+-]+)+/|0x[0-9a-f]+", "", text[0])[:160].replace("|", "/") if text else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


#: What stands in ``docs/releases.md`` from here on stays as it is.
BY_HAND = "## Differences, and how they are met\n"


def document(found: Mapping[str, Mapping[str, Any]], by_hand: str = "") -> str:
    """``docs/releases.md``: one column a release.

    Args:
        found: release to what `look`, `run_tests` and `judge` gave in it.
        by_hand: what follows `BY_HAND`.
    """
    releases = list(found)
    features = list(dict.fromkeys(name for of in found.values() for name in of.get("features", {})))
    gaps: list[str] = []

    def cell(release: str, name: str) -> str:
        of = found[release]
        if "error" in of:
            return "no"
        problems = of["features"].get(name)
        if not problems:
            return "yes" if problems is not None else "-"
        gaps.append(f"- {release}, {name}: torch {'; '.join(problems)}.")
        return f"no ({len(gaps)})"

    def outcome(of: Mapping[str, Any], path: str) -> str:
        got = of.get("tests", {}).get(path)
        if got is None:
            return "not run"
        total = sum(got["counts"].values()) - got["counts"].get("skipped", 0)
        return f"{got['counts'].get('passed', 0)} of {total}" if total else "; ".join(got["failed"])

    rows = [[name, *(cell(release, name) for release in releases)] for name in features]
    paths = sorted({path for of in found.values() for path in of.get("tests", {})})
    tests = [[f"`{path}`", *(outcome(found[release], path) for release in releases)] for path in paths]
    judged = {release: of["catalogue"] for release, of in found.items() if of.get("catalogue")}
    counts = {release: collections.Counter(verdict for verdict, _ in of.values()) for release, of in judged.items()}
    cases = [
        [verdict, *(str(counts[release][verdict]) if release in counts else "not run" for release in releases)]
        for verdict in VERDICTS
        if any(of[verdict] for of in counts.values())
    ]
    differing = []
    for name in sorted(set.intersection(*map(set, judged.values()))) if judged else ():
        of_releases, what = zip(*(of[name] for of in judged.values()))
        if len(set(of_releases)) > 1:
            differing.append([f"`{name}`", *of_releases, "; ".join(dict.fromkeys(filter(None, what)))])
    failing = [
        f"- {release}: `{name}`"
        for release, of in found.items()
        for got in of.get("tests", {}).values()
        for name in got["failed"]
    ]
    refused = [f"- {release}: {of['error']}" for release, of in found.items() if "error" in of]
    reached = ", ".join(
        f"{release}: {of['date']} (Python {of['python']})" for release, of in found.items() if "error" not in of
    )
    parts = [
        "# Releases of torch",
        "Made by `tools/torch_matrix.py` (`make releases`); the first release is the primary one. A feature is there "
        "where torch has every private function that it needs, with the parameters that it relies on "
        f"(`dtensor_compile/compat/patches.py`). Run on {reached}.",
        table(["feature", *releases], rows),
    ]
    for title, text in (
        ("## Gaps", "\n".join(gaps)),
        ("## Refused", "\n".join(refused)),
        ("## Tests that pass", table(["tests", *releases], tests) if tests else ""),
        ("## Tests that do not", "\n".join(failing)),
        ("## Catalogue of programs", table(["verdict", *releases], cases) if cases else ""),
        (
            "## Programs with another verdict",
            table(["program", *judged, "what was seen"], differing) if differing else "",
        ),
    ):
        if text:
            parts += [title, text]
    return "\n\n".join([*parts, BY_HAND + by_hand]).rstrip() + "\n"


def _of_release(text: str) -> tuple[str, str]:
    release, separator, folder = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not RELEASE=PATH")
    return release, folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = pathlib.Path.home() / ".cache" / "dtensor_compile" / "releases"
    parser.add_argument("--releases", nargs="+", default=list(RELEASES))
    parser.add_argument(
        "--environments", type=pathlib.Path, default=default, help="folder of the environments, outside of the tree"
    )
    parser.add_argument(
        "--existing",
        nargs="*",
        type=_of_release,
        default=[],
        metavar="RELEASE=FOLDER",
        help="environments that are there",
    )
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument("--tests", nargs="*", default=["tests"])
    parser.add_argument("--only-environments", action="store_true", help="makes what is not there, and ends")
    parser.add_argument("--only", help="of the catalogue, the cases whose names match")
    parser.add_argument("--no-catalogue", action="store_true", help="what an earlier run found of it stays")
    parser.add_argument(
        "--runs", nargs="*", type=_of_release, default=[], metavar="RELEASE=FILE", help="finished runs of the catalogue"
    )
    parser.add_argument("--seconds", type=float, default=7200, help="for each entry of --tests")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs" / "releases.md")
    args = parser.parse_args(argv)
    if args.only_environments:
        for release in args.releases:
            make_environment(args.environments / release / "environment", release, args.python)
        return 0
    existing, runs, found = dict(args.existing), dict(args.runs), {}
    for release in args.releases:
        kept = args.environments / release
        kept.mkdir(parents=True, exist_ok=True)
        folder = pathlib.Path(existing[release]) if release in existing else kept / "environment"
        interpreter = (
            folder.absolute() / "bin" / "python"
            if release in existing
            else make_environment(folder, release, args.python)
        )
        environment, results = _environment(kept), kept / "found.json"
        of = json.loads(results.read_text()) if results.exists() else {}
        of = {"tests": of.get("tests", {}), "catalogue": of.get("catalogue", {}), **look(interpreter, environment)}
        of["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        for path in args.tests if "error" not in of else ():
            of["tests"][path] = run_tests(interpreter, environment, path, args.seconds)
            print(release, path, of["tests"][path]["counts"], flush=True)
        if "error" not in of and not args.no_catalogue and CORPUS.exists():
            run = pathlib.Path(runs.get(release, kept / "catalogue.json"))
            if release not in runs:
                run_catalogue(interpreter, environment, args.only, run)
            of["catalogue"] = judge(run)
            print(release, dict(collections.Counter(verdict for verdict, _ in of["catalogue"].values())), flush=True)
        results.write_text(json.dumps(of, indent=1))
        found[release] = of
    before = args.output.read_text() if args.output.exists() else ""
    args.output.write_text(document(found, before.partition(BY_HAND)[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
