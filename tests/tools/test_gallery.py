"""What the gallery calls a fault, what its page shows, and that its programs are complete."""

import sys

import pytest
import torch

from tests.tools import TOOLS, load_tool

gallery = load_tool("gallery")


def side(**changed):
    figures = {
        "breaks": 0,
        "graphs": 1,
        "bytes": 1_000_000,
        "collectives": 8,
        "seconds": 0.1,
        "loss_difference": 0.0,
        "parameter_difference": 0.0,
    }
    return figures | changed


def row(ours, stock=None):
    return {"program": "one", "title": "One.", "ranks": 2, "eager": side(), "stock": stock or side(), "ours": ours}


def test_a_program_as_good_as_eager_has_no_fault():
    assert gallery.faults(row(side(collectives=6, bytes=800_000))) == []


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"loss_difference": 1e-3}, "loss_difference from eager 1.0e-03"),
        ({"parameter_difference": float("nan")}, "parameter_difference from eager nan"),
        ({"breaks": 2}, "2 graph breaks, stock none"),
        ({"bytes": 2_000_000}, "bytes: 2,000,000, eager 1,000,000"),
        ({"collectives": 9, "seconds": 0.2}, "collectives: 9, eager 8, and a slower step"),
        ({"seconds": 0.2}, "step 2.00 of eager's"),
    ],
)
def test_faults_are_named(changed, message):
    assert f"one: {message}" in gallery.faults(row(side(**changed)))


def test_breaks_that_stock_has_too_are_no_fault():
    assert gallery.faults(row(side(breaks=2), side(breaks=5))) == []


def test_a_program_that_fails_is_a_fault_and_a_row():
    failed = {"program": "two", "ranks": 2, "failed": "ValueError: no"}
    assert gallery.faults(failed) == ["two: fails: ValueError: no"]
    page = gallery.page([row(side(), {"failed": "TypeError: stock"}), failed])
    assert "| [one](../examples/one/train.py) | 2 | fails | 1 (0) | 8 / fails / 8 |" in page
    assert "- stock, one: TypeError: stock" in page
    assert "| [two](../examples/two/train.py) | 2 | | fails |" in page


@pytest.mark.parametrize("name", gallery.programs())
def test_each_program_says_its_ranks_and_has_a_readme(name):
    path = gallery.programs()[name]
    assert gallery.ranks_of(path) >= 2
    assert len((path.parent / "README.md").read_text().splitlines()) <= 8


def test_an_unknown_program_is_an_error_that_names_those_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(TOOLS / "gallery.py"), "llamma"])
    with pytest.raises(SystemExit) as ended:
        gallery.main()
    assert ended.value.code == 2 and "no such program: llamma; there are accelerate_ddp" in capsys.readouterr().err


@pytest.mark.slow
def test_a_program_runs_beside_eager_and_stock():
    pytest.importorskip("transformers", reason="transformers is not installed (make gallery's environment has it)")
    found = gallery.run("transformers_tp", gallery.programs()["transformers_tp"], repeats=1, timeout=280)
    assert found["ours"]["graphs"] == 1 and not found["ours"]["breaks"]
    assert found["ours"]["collectives"] < found["eager"]["collectives"]
    assert found["ours"]["loss_difference"] < gallery.TOLERANCE


def test_a_loop_that_a_package_owns_runs_one_step_at_a_time():
    ran = []

    def loop(after_step):
        for number in range(100):
            ran.append(number)
            if after_step(torch.tensor(float(number))):
                return

    step = gallery.OwnLoop(loop)
    assert [step().item() for _ in range(3)] == [0, 1, 2] and ran == [0, 1, 2]
    losses = []
    assert gallery._collectives(step, losses) == 0 and losses[0] == 3
    step.end()
    assert ran == [0, 1, 2, 3]


def test_an_error_of_such_a_loop_is_the_callers():
    def loop(after_step):
        after_step(torch.tensor(0.0))
        raise ValueError("no")

    step = gallery.OwnLoop(loop)
    step()
    with pytest.raises(ValueError, match="no"):
        step()
