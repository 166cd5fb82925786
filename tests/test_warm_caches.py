"""Programs that run in two processes, one after the other, with one folder of caches: the second finds what the first
left, and is as right.

`DTENSOR_COMPILE_CATALOGUE` says which part of the catalogue of programs runs: ``3/40`` are the programs 3, 43, 83, ...;
``0/1`` all of them."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.warm_programs import PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = pathlib.Path(__file__).parent.parent
CATALOGUE = ROOT.parent / "shared" / "corpus"
#: What a run of the catalogue says of a program: whether it runs, and what differs from eager.
JUDGED = ("crash", "eager_ok", "compile_ok", "fullgraph_ok", "parity", "fullgraph_parity")
PART = os.environ.get("DTENSOR_COMPILE_CATALOGUE", "3/40")


def run(command, folder, cwd=ROOT):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=1700, env=environment, cwd=cwd, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right_in_the_process_that_finds_its_graphs(tmp_path, name):
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.warm_programs",
        name,
    ]
    found = []
    for _ in range(2):
        answers = re.findall(r"rank (\d): .*: (equal), (\d+) found", (printed := run(command, tmp_path)))
        assert sorted(rank for rank, *_ in answers) == ["0", "1"], printed
        found.append([int(hits) for *_, hits in sorted(answers)])
    assert all(warm > cold for cold, warm in zip(*found)), found


def test_the_catalogue_has_the_same_verdicts_with_and_without_what_caches_keep(tmp_path):
    if not CATALOGUE.exists():
        pytest.skip(f"there is no catalogue at {CATALOGUE}")
    first, step = map(int, PART.split("/"))
    names = re.findall(r"^def case_(\w+)\(", (CATALOGUE / "patterns.py").read_text(), re.MULTILINE)[first::step]
    (tmp_path / "names").write_text("\n".join(names))
    judged = []
    for number in range(2):
        path = tmp_path / f"{number}.json"
        chosen = ["--names", str(tmp_path / "names"), "--json", str(path)]
        run(["run_corpus.py", "--compile-backend", "dtensor", *chosen], tmp_path / "cache", CATALOGUE)
        judged.append(
            {record["name"]: [record.get(fact) for fact in JUDGED] for record in json.loads(path.read_text())}
        )
    assert judged[0].keys() == set(names)
    assert judged[1] == judged[0]
