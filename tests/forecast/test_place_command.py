"""``dtensor-compile place``."""

import json
import re

import pytest
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
    assert main(["place", HERE + "tokens", "--mesh", "dp=2,tp=2", "--code", str(file)]) == 0
    assert main(["explain", HERE + "tokens", "--mesh", "dp=2,tp=2", "--value", "1.down"]) == 0
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


def test_what_holds_the_memory_is_said(capsys):
    assert main(["place", HERE + "tokens", "--mesh", "tp=4", "--memory", "0.001MB"]) == 1
    out = capsys.readouterr().out
    assert "what holds the memory" in out and "gradient and states" in out


@pytest.mark.slow
def test_another_plan_is_compared_by_name_and_by_file(capsys, tmp_path):
    saved = tmp_path / "plan.json"
    assert main(["place", HERE + "tokens", "--mesh", "dp=2,tp=2", "--json", str(saved)]) == 0
    capsys.readouterr()
    assert main(["place", HERE + "tokens", "--mesh", "dp=2,tp=2", "--compare", str(saved)]) == 0
    assert "no row differs" in capsys.readouterr().out
    name = "fully_shard over dp x tensor parallel over tp"
    assert main(["place", HERE + "tokens", "--mesh", "dp=2,tp=2", "--compare", name]) == 0
    out = capsys.readouterr().out
    assert f"differences from {name}" in out and "no row differs" not in out


def test_what_the_rules_refuse_is_said(capsys):
    found = placed(capsys, HERE + "tokens", "--mesh", "tp=4", "--value", "0")
    assert found["refused"] == [["aten.embedding", "tp", "1", "S(0)", "2 does not divide into 4 even shards"]]


def test_forms_of_code(capsys):
    for form, name in (("tensors", "distribute"), ("styles", "parallelize"), ("marks", "mark")):
        assert main(["place", HERE + "tokens", "--mesh", "dp=2,tp=2", "--form", form, "--code", "-"]) == 0
        scope: dict = {}
        exec(capsys.readouterr().out, scope)
        assert callable(scope[name])


def test_the_page(tmp_path):
    file = tmp_path / "plan.html"
    arguments = ["place", HERE + "tokens", "--mesh", "dp=2,tp=2", "--memory", "0.001MB", "--html", str(file)]
    assert main(arguments) == 1
    page = file.read_text()
    assert "default-src 'none'" in page and "<script" not in page
    rows = re.findall(r"<tr.*?>(.*?)</tr>", page, re.DOTALL)
    texts = [
        [re.sub("<.*?>", "", cell).strip() for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows
    ]
    assert ["plan", "step", "compute", "exposed", "hidden", "sent", "memory"] in texts
    assert any(text[0].startswith("aten.mm") and "-&gt;" in text[1] for text in texts)
    assert "too much" in page


@pytest.mark.slow
def test_the_code_of_plans_is_forecast(capsys):
    own = HERE + "tensor_parallel"
    found = placed(capsys, HERE + "tokens", "--mesh", "tp=2", "--gpu", "h100", "--forecast", "--own", own)["forecast"]
    assert {"this one", "fully_shard", "tensor parallel", own} <= found.keys()
    for figures in found.values():
        assert "failed" not in figures, figures
        assert figures["step"] >= figures["compute"] > 0 and figures["memory"] > 0


def test_bad_input(capsys):
    for arguments, message in (
        ([HERE + "tokens"], "--mesh is missing"),
        ([HERE + "step", "--mesh", "tp=2"], "returns no model and its inputs"),
        ([HERE + "tokens", "--mesh", "tp=2", "--value", "9.up"], "'9.up' is no parameter, input or module"),
        ([HERE + "tokens", "--mesh", "tp=2", "--loss", "huber"], "--loss huber is none of"),
        (
            [HERE + "tokens", "--mesh", "tp=2", "--compare", "megatron"],
            "neither a known plan (data parallel",
        ),
        ([HERE + "tokens", "--mesh", "tp=2", "--cluster", "cpu-1gbit", "--forecast"], "needs the name of a GPU"),
        ([HERE + "tokens", "--mesh", "a=1,b=1,c=2", "--form", "styles", "--code", "-"], "one or two dims, not 3"),
    ):
        assert main(["place", *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert main(["explain", HERE + "tokens", "--mesh", "tp=2"]) == 2
    assert "--value is missing" in capsys.readouterr().err


def test_the_default_dtype_and_device_are_as_before():
    before = torch.get_default_dtype(), torch.get_default_device()
    main(["place", HERE + "tokens", "--mesh", "tp=2", "--json", "-"])
    assert (torch.get_default_dtype(), torch.get_default_device()) == before
