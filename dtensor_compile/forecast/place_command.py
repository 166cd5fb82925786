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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dtensor_compile.compat.dynamo.observe import uncompiled
from dtensor_compile.errors import DTensorCompileError, one_line
from dtensor_compile.forecast.compare_plans import BYTES
from dtensor_compile.forecast.plan_command import add_step_arguments, argument_of, check_loss
from dtensor_compile.forecast.plan_table import size
from dtensor_compile.forecast.training import StepSettings, Training
from dtensor_compile.global_plan.alternatives import alternatives
from dtensor_compile.global_plan.choose_placements import Choice
from dtensor_compile.global_plan.equal_calls import pattern
from dtensor_compile.global_plan.known_plans import Alternative
from dtensor_compile.global_plan.place import PlacementPlan, place
from dtensor_compile.global_plan.placement_code import by_pattern, placement_code
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.report.compare_reports import parse_limit, seconds_text
from dtensor_compile.report.report_command import BROKEN, OK, main_of
from dtensor_compile.report.run_target import Job, mesh_of, parse_mesh_argument, running
from dtensor_compile.report.script_arguments import options_parser
from dtensor_compile.report.table import console_for
from dtensor_compile.report.target import TargetError, call_target, function_of, program_of
from dtensor_compile.topology.files import topology
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
    p.add_argument("--value", metavar="NAME", help="other placements of a parameter, an input or a module's result")
    p.add_argument("--code", metavar="FILE", help="write the plan as Python code; - for standard output")
    p.add_argument("--json", metavar="FILE", help="write the plan as JSON; - for standard output, instead of tables")
    p.add_argument("--verbose", action="store_true", help="the traceback of an error")
    return p


def main(argv: Sequence[str], program: str = "dtensor-compile place") -> int:
    """Runs the command; returns the exit status."""
    return main_of(parser(program), argv, _run, "Scripts cannot be placed: give a function.")


def _run(args: argparse.Namespace) -> int:
    check_loss(args.loss)
    if args.mesh is None:
        raise TargetError("--mesh is missing: the sizes of the mesh to place over, such as --mesh dp=8,tp=8")
    memory = parse_limit(args.memory, BYTES).of(None) if args.memory else None
    job = Job(parse_mesh_argument(args.mesh))
    with running(job):
        plan = _plan(args.target, job, args, memory)
        of_value = alternatives(plan, args.value) if args.value else []
    if args.code is not None and args.code != "-":
        pathlib.Path(args.code).write_text(placement_code(plan))
    if args.json is not None:
        text = json.dumps(_values(plan, of_value), indent=2)
        if args.json == "-":
            print(text)
        else:
            pathlib.Path(args.json).write_text(text)
    if args.code == "-":
        print(placement_code(plan), end="")
    elif args.json != "-":
        _print(plan, args.value, of_value, console_for())
    return OK if plan.choice.fits else BROKEN


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


def _print(
    plan: PlacementPlan,
    asked: str | None,
    of_value: Sequence[Alternative],
    console: Console,
) -> None:
    names = "".join(f" {name}={n}" for name, n in zip(plan.mesh.mesh_dim_names or (), plan.mesh.shape))
    table = Table(title=f"placements over{names}", title_justify="left")
    for column in ("parameter", "placements", "local tensor"):
        table.add_column(column)
    sizes = _local_sizes(plan)
    for name, placements in by_pattern(plan.parameters).items():
        table.add_row(name, spec_text(placements), sizes[name])
    for i, placements in enumerate(plan.inputs):
        table.add_row(f"input {i}", spec_text(placements), sizes[str(i)])
    console.print(table)
    choices = Table(title="plans", title_justify="left")
    choices.add_column("plan")
    for column in ("step", "compute", "exposed", "hidden", "sent", "memory"):
        choices.add_column(column, justify="right")
    _add_row(choices, "this one", plan.choice)
    for other in plan.known:
        _add_row(choices, other.name, other.choice)
    console.print(choices)
    console.print(
        f"no plan of equal blocks placed equally is faster by more than {plan.choice.gap:.2%}, by this estimate; the "
        "memory is that of parameters, gradients, optimizer states and what the backward pass needs",
        highlight=False,
    )
    for op in sorted(plan.without_rule):
        console.print(f"{op} has no rule in DTensor: it runs on replicated tensors", highlight=False)
    if asked is not None:
        _print_value(asked, of_value, plan, console)
    if not plan.choice.fits and plan.budget is not None:
        console.print(
            f"no plan fits into {size(int(plan.budget))}: the nearest, above, needs {size(int(plan.choice.memory))}",
            highlight=False,
        )


def _print_value(name: str, of_value: Sequence[Alternative], plan: PlacementPlan, console: Console) -> None:
    table = Table(title=f"placements of {name}", title_justify="left")
    table.add_column("placements")
    for column in ("slower by", "compute", "exposed", "hidden", "sent", "memory"):
        table.add_column(column, justify="right")
    for other in of_value:
        slower = "chosen" if other.chosen else ""
        if other.choice is not None and not other.chosen:
            slower = f"{other.choice.seconds / plan.choice.seconds - 1:.2%}"
        _add_row(table, other.name, other.choice, slower)
    console.print(table)


def _add_row(table: Table, name: str, choice: Choice | None, first: str | None = None) -> None:
    if choice is None:
        table.add_row(name, "not possible" if first is None else first or "not possible")
        return
    table.add_row(
        name,
        seconds_text(choice.seconds) if first is None else first,
        *(seconds_text(part) for part in (choice.compute, choice.exposed, choice.hidden)),
        size(int(choice.sent)),
        size(int(choice.memory)) + ("" if choice.fits else ", too much"),
    )


def _local_sizes(plan: PlacementPlan) -> dict[str, str]:
    """The sizes of the local tensor of each parameter's pattern and of each input."""
    found: dict[str, str] = {}
    numbered = {**plan.step.parameters, **{str(i): number for i, number in enumerate(plan.step.inputs)}}
    placed: Mapping[str, Any] = {**plan.parameters, **{str(i): p for i, p in enumerate(plan.inputs)}}
    patterns = by_pattern(placed)
    for name, number in numbered.items():
        shape = list(plan.step.tensors[number].shape)
        for placement, n in zip(placed[name], plan.mesh.shape):
            if placement.is_shard():
                shape[placement.dim] //= n
        found.setdefault(pattern(name) if pattern(name) in patterns else name, str(tuple(shape)))
    return found


def _values(plan: PlacementPlan, of_value: Sequence[Alternative]) -> dict[str, Any]:
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
        "value": {other.name: figures(other.choice) for other in of_value},
        "without_rule": sorted(plan.without_rule),
    }
