"""``dtensor-compile place``."""

import json

import torch

from dtensor_compile.cli import main

HERE = "tests.forecast.targets:"


def placed(capsys, *arguments) -> dict:
    status = main(["place", *arguments, "--json", "-"])
    out = capsys.readouterr().out
    assert status in (0, 1)
    return json.loads(out)


def test_a_plan_its_alternatives_and_known_plans(capsys):
    found = placed(capsys, HERE + "tokens", "--mesh", "tp=4", "--value", "1.up.weight")
    assert found["parameters"].keys() == {"0.weight", "1.up.weight", "1.down.weight"}
    assert found["mesh"] == {"tp": 4}
    best = found["plan"]["seconds"]
    assert found["plan"]["bound"] <= best
    known = [figures for figures in found["known"].values() if figures]
    assert known and all(figures["seconds"] >= best * 0.994 for figures in known)
    assert all(figures["seconds"] >= found["plan"]["bound"] for figures in found["value"].values())
    assert found["value"].keys() == {"R", "S(0)", "S(1)"}
    assert found["known"].keys() == {"data parallel", "fully_shard", "tensor parallel"}


def test_tables_and_code(capsys, tmp_path):
    file = tmp_path / "plan.py"
    assert main(["place", HERE + "tokens", "--mesh", "dp=2,tp=2", "--code", str(file), "--value", "1.down"]) == 0
    out = capsys.readouterr().out
    assert "placements over dp=2 tp=2" in out and "fully_shard over dp x tensor parallel over tp" in out
    assert "placements of 1.down" in out
    scope: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    assert set(scope["STATE"]) == {"0.weight", "1.up.weight", "1.down.weight"}
    assert len(scope["INPUTS"]) == 1


def test_a_budget_that_nothing_fits(capsys):
    assert main(["place", HERE + "tokens", "--mesh", "tp=4", "--memory", "0.001MB"]) == 1
    assert "no plan fits into 1 KiB: the nearest, above, needs" in " ".join(capsys.readouterr().out.split())


def test_bad_input(capsys):
    for arguments, message in (
        ([HERE + "tokens"], "--mesh is missing"),
        ([HERE + "step", "--mesh", "tp=2"], "returns no model and its inputs"),
        ([HERE + "tokens", "--mesh", "tp=2", "--value", "9.up"], "'9.up' is no parameter, input or module"),
        ([HERE + "tokens", "--mesh", "tp=2", "--loss", "huber"], "--loss huber is none of"),
    ):
        assert main(["place", *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_the_default_dtype_and_device_are_as_before():
    before = torch.get_default_dtype(), torch.get_default_device()
    main(["place", HERE + "tokens", "--mesh", "tp=2", "--json", "-"])
    assert (torch.get_default_dtype(), torch.get_default_device()) == before
