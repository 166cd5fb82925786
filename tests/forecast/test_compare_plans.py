"""Comparison of plans, and their limits."""

import dataclasses

import pytest

from dtensor_compile.cli import main
from dtensor_compile.forecast.compare_plans import PlanLimits, compare_plans
from dtensor_compile.forecast.step_plan import VERSION, Basis, Communication, StepMemory, StepPlan, StepTime
from dtensor_compile.forecast.timeline import Timeline
from dtensor_compile.report.compare_reports import LimitError

GIB = 2**30
MEMORY = StepMemory(
    ("parameters", "temporaries"), (), 3 * GIB, (GIB, 2 * GIB), "", "", (), 4 * GIB, GIB, 80 * GIB, True
)
TIME = StepTime(0.2, 0.1, 0.06, 0.04, 0.0, 0.01, 0.1, 0.1, 0.0)
PLAN = StepPlan(
    VERSION, "t", "2.13", "dp=2", 2, "h100", "h100", "sum", "adamw", 0.0, MEMORY, TIME,
    (Communication("dp", "all_gather", 4, 100, 0.1, 0.0),), 1, 1, 0.5, 1000, 2, 0, 9, 0, (),
    Timeline((), (), ()), (),
)  # fmt: skip


def slower(plan):
    sent = (Communication("dp", "all_gather", 6, 150, 0.1, 0.0),)
    return dataclasses.replace(plan, time=dataclasses.replace(TIME, step=0.25, exposed=0.11), communication=sent)


def test_changes():
    comparison = compare_plans(PLAN, slower(PLAN))
    changes = {change.name.strip(): (change.base, change.now) for change in comparison.changes}
    assert changes["step"] == (0.2, 0.25) and changes["exposed"] == (0.06, 0.11)
    assert changes["tokens a second"] == (5000, 4000)
    assert changes["memory with segments"] == (5 * GIB, 5 * GIB) and changes["temporaries"] == (2 * GIB, 2 * GIB)
    assert comparison.came == ("2 x all_gather[dp]",) and comparison.went == ()


@pytest.mark.parametrize(
    "memory, step, lines",
    [
        ("5GiB", "200ms", []),
        ("4GiB", None, ["--max-memory 4GiB: 5.00 GiB, at most 4.00 GiB"]),
        ("+0%", "+5%", ["--max-step +5%: 250.00 ms, at most 210.00 ms"]),
        (None, "+30%", []),
    ],
    ids=str,
)
def test_limits(memory, step, lines):
    plan = slower(PLAN) if step and "+" in step else PLAN
    assert PlanLimits.parse(PLAN, memory, step).exceeded(plan) == lines


def test_limits_that_do_not_parse():
    with pytest.raises(LimitError, match="needs --compare"):
        PlanLimits.parse(None, "+5%", None)
    with pytest.raises(LimitError, match="is not a limit"):
        PlanLimits.parse(PLAN, None, "soon")


def test_a_base_that_is_not_there(tmp_path, capsys):
    target = ["plan", "tests.forecast.targets:tensor_parallel"]
    assert main([*target, "--compare", str(tmp_path / "no.json")]) == 2
    assert "there is no plan" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{}")
    assert main([*target, "--compare", str(tmp_path / "bad.json")]) == 2
    assert "bad.json: not a plan" in capsys.readouterr().err


def test_the_error_of_a_step_is_that_of_its_parts():
    kernels = Basis("kernels", "rates", "measured", 0.1)
    host = Basis("host", "one host", "guess", 0.5)
    plan = dataclasses.replace(PLAN, rests_on=(Basis("memory", "code", "simulated", 0.01), kernels, host))
    assert plan.step_error == pytest.approx(0.1 * TIME.compute + 0.5 * TIME.idle)
    assert str(kernels) == "kernels: rates (measured, ±10%)"
