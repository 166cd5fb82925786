"""Plans of many settings."""

import json
import os
import re
import subprocess

import pytest

from dtensor_compile.cli import main
from dtensor_compile.forecast.forecast import KERNELS, make_plan
from dtensor_compile.forecast.step_plan import from_json, to_json
from dtensor_compile.forecast.sweep import Swept, combinations, order, parse_sweep, run_sweep, value_of
from dtensor_compile.report.run_target import Job
from dtensor_compile.report.target import TargetError

MESH = (("dp", 64), ("tp", 8))


def test_a_sweep_is_a_name_and_values():
    assert parse_sweep("tp=2, 4,8") == ("tp", ("2", "4", "8"))
    for text in ("tp", "tp=", "=2", "2=3"):
        with pytest.raises(TargetError, match="is no sweep: write NAME=VALUE,VALUE"):
            parse_sweep(text)


@pytest.mark.parametrize(
    "text, value", [("2", 2), ("0.5", 0.5), ("on", True), ("False", False), ("bf16", "bf16")], ids=str
)
def test_values_of_arguments(text, value):
    assert value_of(text) == value and type(value_of(text)) is type(value)


def test_the_number_of_ranks_stays():
    made = combinations([("tp", ("2", "8")), ("batch", ("1", "2"))], MESH)
    assert [dict(this.mesh) for this in made] == [{"dp": 256, "tp": 2}] * 2 + [{"dp": 64, "tp": 8}] * 2
    assert [this.settings["batch"] for this in made] == ["1", "2", "1", "2"]


def test_both_mesh_dims_may_vary():
    (made,) = combinations([("dp", ("32",)), ("tp", ("16",))], MESH)
    assert dict(made.mesh) == {"dp": 32, "tp": 16}


@pytest.mark.parametrize(
    "sweeps, message",
    [
        ([("tp", ("3",))], "tp=3 does not divide the 512 ranks"),
        ([("dp", ("2",)), ("tp", ("2",))], "dp=2, tp=2 does not divide the 512 ranks"),
        ([("tp", ("two",))], "tp is a mesh dim, and 'two' no size of one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_meshes_that_do_not_divide(sweeps, message):
    with pytest.raises(TargetError, match=message):
        combinations(sweeps, MESH)


def test_what_failed_comes_last():
    failed = Swept({"a": "1"}, (), failed="no")
    assert order([failed, failed]) == [failed, failed]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command(tmp_path, capsys):
    file = tmp_path / "plans.json"
    command = [
        "plan",
        "tests.forecast.targets:sized",
        "--mesh",
        "dp=1,tp=2",
        "--optimizer",
        "none",
        "--json",
        str(file),
    ]
    assert main([*command, "--sweep", "width=64,128,262144", "--set=checkpoint=on"]) == 0
    output = " ".join(re.sub("[^ -~]", " ", capsys.readouterr().out).split())
    assert "3 plans" in output and "best: dp=1,tp=2 width=64" in output
    assert re.search(r"next best: dp=1,tp=2 width=128, \d+\.\d% slower", output)
    assert "does not" in output and "too much" in output
    found = json.loads(file.read_text())
    assert [this["plan"]["memory"]["fits"] for this in found] == [True, True, False]


def test_an_argument_that_the_function_does_not_take(capsys):
    assert main(["plan", "tests.forecast.targets:sized", "--mesh", "dp=1,tp=2", "--set", "batch=2"]) == 2
    assert "takes no argument 'batch': it takes mesh, rows, width, checkpoint" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plans_share_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv(KERNELS, str(tmp_path))

    def planned(target):
        made = make_plan(f"tests.forecast.targets:{target}", Job((("tp", 2),)), gpu="h100")
        return to_json(made), sorted(tmp_path.rglob("*.cubin"))

    plan, kernels = planned("tensor_parallel")
    assert len(kernels) == from_json(plan).kernels > 0
    assert planned("tensor_parallel") == (plan, kernels), "compiled again, or planned otherwise"


def test_processes_of_a_sweep_have_one_folder_for_kernels(monkeypatch):
    folders = []

    def run(arguments, *, env, **others):
        folders.append(env[KERNELS])
        assert os.path.isdir(folders[-1])
        return subprocess.CompletedProcess(arguments, 2, stdout="", stderr="no plan")

    monkeypatch.setattr(subprocess, "run", run)
    swept = run_sweep(combinations([("batch", ("1", "2"))], MESH), ["target.py:build"], 1, lambda done: None)
    assert [this.failed for this in swept] == ["no plan"] * 2
    assert len(folders) == 2 and len(set(folders)) == 1 and not os.path.exists(folders[0])
