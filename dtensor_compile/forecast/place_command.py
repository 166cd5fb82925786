"""``dtensor-compile place TARGET``: placements of parameters and inputs for a training step, found on one machine.

TARGET is a function that returns a model and its inputs, as for report; it may take the mesh. Parameters and inputs
that it made DTensors stay as they are; placements of all others, and of what the operators read, are chosen together.
The model is made on the meta device, and nothing of it is computed.

Exit status: 0; 1 if no plan fits into the memory; 2 if there is no plan.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from dtensor_compile.compat.dynamo.observers.observe import uncompiled
from dtensor_compile.errors import DTensorCompileError, one_line
from dtensor_compile.forecast.compare_plans import BYTES
from dtensor_compile.forecast.place_page import placement_page
from dtensor_compile.forecast.place_table import Shown, ShownDifferences, ShownValue, print_plan
from dtensor_compile.forecast.placed_steps import Forecast, PlacedTarget, forecasts_of
from dtensor_compile.forecast.plan_command import add_step_arguments, argument_of, check_loss
from dtensor_compile.forecast.training import StepSettings, Training
from dtensor_compile.global_plan.alternatives import alternatives, refusals
from dtensor_compile.global_plan.choose_placements import Choice
from dtensor_compile.global_plan.known_plans import known_names
from dtensor_compile.global_plan.parallel_styles import check_dims
from dtensor_compile.global_plan.place import PlacementPlan, place
from dtensor_compile.global_plan.placement_code import FORMS, placement_code
from dtensor_compile.global_plan.plan_rows import PlanRow, differences, plan_rows, row_of_values, row_values
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.report.compare_reports import parse_limit
from dtensor_compile.report.report_command import BROKEN, OK, main_of
from dtensor_compile.report.run_target import Job, mesh_of, parse_mesh_argument, running
from dtensor_compile.report.script_arguments import options_parser
from dtensor_compile.report.table import console_for
from dtensor_compile.report.target import TargetError, call_target, function_of, program_of
from dtensor_compile.topology.files import topology
from dtensor_compile.topology.gpus import GPUS
from dtensor_compile.topology.links import CLUSTERS

#: Bytes of a gradient and of optimizer states for each byte of a parameter.
_STATES = {"adamw": 3.0, "adam": 3.0, "sgd": 1.0, "none": 0.0}


def parser(program: str) -> argparse.ArgumentParser:
    p = options_parser(program)
    p.add_argument("--mesh", metavar="dp=8,tp=8", help="mesh to place over")
    p.add_argument(
        "--cluster", "--gpu", default="h100", metavar="NAME|FILE", help=f"{', '.join(CLUSTERS)}, or a file (h100)"
    )
    p.add_argument("--memory", metavar="80GB", help="memory that a rank may hold (default: no limit)")
    add_step_arguments(p)
    value = "other placements of a parameter, an input or a module's result, what each costs, and what rules refuse"
    p.add_argument("--value", metavar="NAME", help=value)
    p.add_argument(
        "--compare",
        metavar="PLAN|FILE",
        help="where another plan differs: the name of a known one, or its JSON",
    )
    p.add_argument(
        "--forecast", action="store_true", help="forecast the code that is compiled for this plan and for known ones"
    )
    own = "--forecast, with another target, which distributes its model itself (several times)"
    p.add_argument("--own", action="append", default=[], metavar="TARGET", help=own)
    p.add_argument("--code", metavar="FILE", help="write the plan as Python code; - for standard output")
    p.add_argument("--form", default="tensors", choices=list(FORMS), help="of the code (tensors)")
    p.add_argument("--html", metavar="FILE", help="write the plan as a page: placements and bytes of every operator")
    p.add_argument("--json", metavar="FILE", help="write the plan as JSON; - for standard output, instead of tables")
    p.add_argument("--verbose", action="store_true", help="the traceback of an error")
    return p


def main(argv: Sequence[str], program: str = "dtensor-compile place") -> int:
    """Runs the command; returns the exit status."""
    return main_of(parser(program), argv, _run, "Scripts cannot be placed: give a function.")


def explain(argv: Sequence[str]) -> int:
    """``dtensor-compile explain``: the same for one value of the plan."""
    return main_of(parser("dtensor-compile explain"), argv, _explained, "Scripts cannot be placed: give a function.")


def _explained(args: argparse.Namespace) -> int:
    if args.value is None:
        raise TargetError("--value is missing: what to explain, a parameter, an input's number or a module")
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    check_loss(args.loss)
    if args.mesh is None:
        raise TargetError("--mesh is missing: the sizes of the mesh to place over, such as --mesh dp=8,tp=8")
    memory = parse_limit(args.memory, BYTES).of(None) if args.memory else None
    job = Job(parse_mesh_argument(args.mesh))
    if args.code and args.form == "styles":
        check_dims(len(job.mesh))
    saved = _saved_rows(args.compare, [name for name, _ in job.mesh]) if args.compare else None
    placed = _placed_target(args, job) if args.forecast or args.own else None
    with running(job):
        plan = _plan(args.target, job, args, memory)
        shown = _shown(plan, args, saved)
    if placed is not None:
        shown = replace(shown, forecasts=forecasts_of(plan, placed, args.own))
    _write(args.code, placement_code(plan, args.form) if args.code else "")
    _write(args.json, json.dumps(_values(plan, shown), indent=2) + "\n" if args.json else "")
    _write(args.html, placement_page(args.target, plan, shown.rows) if args.html else "")
    if "-" not in (args.code, args.json, args.html):
        print_plan(plan, shown, console_for())
    return OK if plan.choice.fits else BROKEN


def _write(file: str | None, text: str) -> None:
    if file == "-":
        print(text, end="")
    elif file is not None:
        pathlib.Path(file).write_text(text, encoding="utf-8")


def _shown(plan: PlacementPlan, args: argparse.Namespace, saved: list[PlanRow] | None) -> Shown:
    rows = plan_rows(plan.variables, plan.choice)
    value = ShownValue(args.value, alternatives(plan, args.value), refusals(plan, args.value)) if args.value else None
    if args.compare is None:
        return Shown(rows, value)
    other = differences(saved if saved is not None else _known_rows(plan, args.compare), rows)
    return Shown(rows, value, ShownDifferences(args.compare, other))


def _placed_target(args: argparse.Namespace, job: Job) -> PlacedTarget:
    if args.cluster not in GPUS:
        raise TargetError(f"--forecast needs the name of a GPU as --gpu: {', '.join(GPUS)}")
    settings = StepSettings(args.loss, args.optimizer, blocks="traced")
    return PlacedTarget(args.target, job, args.cluster, None, settings, dict(map(argument_of, args.set)))


def _known_rows(plan: PlacementPlan, name: str) -> list[PlanRow]:
    """The rows of a known plan."""
    choice = next(this.choice for this in plan.known if this.name == name)
    if choice is None:
        raise TargetError(f"{name} is not possible for this model and mesh")
    return plan_rows(plan.variables, choice)


def _saved_rows(file: str, mesh_dims: Sequence[str]) -> list[PlanRow] | None:
    """The rows of a plan that was saved; None for the name of a known plan."""
    known = known_names(mesh_dims)
    if file in known:
        return None
    try:
        return list(map(row_of_values, json.loads(pathlib.Path(file).read_text())["rows"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetError(
            f"--compare {file}: neither a known plan ({', '.join(known)}) nor a file with a plan as JSON ({error})"
        ) from error


def _plan(target: str, job: Job, args: argparse.Namespace, memory: float | None) -> PlacementPlan:
    with torch.device("meta"):
        found = program_of(
            call_target(function_of(target), target, lambda: mesh_of(job, "cpu"), dict(map(argument_of, args.set)))
        )
    if found is None or not isinstance(uncompiled(found.model), torch.nn.Module):
        raise TargetError(f"{target} returns no model and its inputs: placements are found for a module and one call")
    training = Training(found, found.model, StepSettings(args.loss, args.optimizer))
    loss: Callable[[Any], torch.Tensor] = training.loss
    inputs: Any = dict(found.kwargs) if found.kwargs else found.args
    try:
        return place(
            uncompiled(found.model),
            mesh_of(job, "cpu"),
            inputs,
            loss=loss,
            memory=memory,
            topology=topology(args.cluster),
            states=_STATES[args.optimizer],
        )
    except DTensorCompileError:
        raise
    except Exception as error:
        raise TargetError(
            f"{target} does not run on fake tensors: {type(error).__name__}: {one_line(error)}; --verbose "
            "shows the traceback"
        ) from error


def _values(plan: PlacementPlan, shown: Shown) -> dict[str, Any]:
    def figures(choice: Choice | None) -> dict[str, float] | None:
        if choice is None:
            return None
        names = ("seconds", "compute", "exposed", "hidden", "memory", "sent", "bound", "fits")
        return {name: getattr(choice, name) for name in names}

    return {
        "mesh": dict(zip(plan.mesh.mesh_dim_names or (), plan.mesh.shape)),
        "parameters": {name: spec_text(p) for name, p in plan.parameters.items()},
        "inputs": [spec_text(p) for p in plan.inputs],
        "results": {name: spec_text(p) for name, p in plan.results.items()},
        "plan": figures(plan.choice),
        "known": {other.name: figures(other.choice) for other in plan.known},
        "value": {other.name: figures(other.choice) for other in shown.value.others} if shown.value else {},
        "refused": [list(map(str, this)) for this in shown.value.refused] if shown.value else [],
        "without_rule": sorted(plan.without_rule),
        "rows": [row_values(row) for row in shown.rows],
        "forecast": {this.name: _forecast_values(this) for this in shown.forecasts},
    }


def _forecast_values(this: Forecast) -> dict[str, Any]:
    if this.plan is None:
        return {"failed": this.failed}
    return {**asdict(this.plan.time), "memory": this.plan.memory.needed}
