"""``dtensor-compile plan TARGET``: memory and time of a training step on a cluster that is not available.

TARGET is a function or a script, as for report: a function returns a model and its inputs, of which a whole training
step is made (loss, backward, clipping, optimizer), or a step to call; a script runs as it is until it has made three
steps. Its code is compiled for the GPU as it would be there, and runs on tensors without values.

Exit status: 0; 1 if the step does not fit into the GPU, or a limit is exceeded; 2 if it could not be forecast.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress

from dtensor_compile.forecast.compare_plans import PlanLimits, compare_plans
from dtensor_compile.forecast.forecast import make_plan
from dtensor_compile.forecast.plan_page import require_plotly, sweep_to_html, to_html
from dtensor_compile.forecast.plan_table import print_plan, print_sweep
from dtensor_compile.forecast.plan_trace import to_trace
from dtensor_compile.forecast.step_plan import PlanFormatError, StepPlan, from_json, to_json
from dtensor_compile.forecast.sweep import combinations, parse_sweep, run_sweep, value_of
from dtensor_compile.forecast.training import LOSSES, OPTIMIZERS, StepSettings
from dtensor_compile.report.report_command import BROKEN, OK, main_of
from dtensor_compile.report.run_target import Job, parse_mesh_argument
from dtensor_compile.report.script_arguments import options_parser
from dtensor_compile.report.table import console_for, print_comparison
from dtensor_compile.report.target import TargetError, is_script
from dtensor_compile.topology.gpus import GPUS
from dtensor_compile.topology.links import CLUSTERS

_SCRIPT = "A script is run as it is, on an emulated GPU, until it has made three steps of an optimizer."


def parser(program: str) -> argparse.ArgumentParser:
    p = options_parser(program)
    p.add_argument("--mesh", metavar="dp=64,tp=8", help="mesh for a function that takes one")
    p.add_argument("--world", type=int, metavar="N", help="ranks of the job (default: of --mesh, else 2)")
    p.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to look from (default 0)")
    p.add_argument(
        "--gpu", default="h100", metavar="NAME|FILE", help=f"{', '.join(GPUS)}, or a TOML or JSON file (h100)"
    )
    p.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help=f"links of the job: {', '.join(CLUSTERS)}, or a file (default: the preset of the GPU's name)",
    )
    add_step_arguments(p)
    p.add_argument("--clip", type=float, default=0.0, metavar="NORM", help="clip gradients to this norm")
    blocks = "equal blocks are compiled once, or each by itself, as by default elsewhere (traced); default once"
    p.add_argument("--blocks", default="once", choices=["once", "traced"], help=blocks)
    p.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="plan with each of these sizes of a mesh dim, or values of an argument (several times: all combinations)",
    )
    p.add_argument("--jobs", type=int, metavar="J", help="plans of a sweep at once (default: one for each CPU core)")
    p.add_argument("--json", metavar="FILE", help="write the plan as JSON; - for standard output, instead of tables")
    p.add_argument("--html", metavar="FILE", help="write a page with memory over time and the timeline, or the sweep")
    p.add_argument("--trace", metavar="FILE", help="write the timeline in Chrome's format, for ui.perfetto.dev")
    p.add_argument("--compare", metavar="BASE", help="show what changed since a plan that --json has written")
    p.add_argument("--max-memory", metavar="70GiB|+5%%", help="exit status 1 if more is needed")
    p.add_argument("--max-step", metavar="200ms|+5%%", help="exit status 1 if a step takes longer")
    p.add_argument("--verbose", action="store_true", help="the traceback of an error")
    return p


def add_step_arguments(p: argparse.ArgumentParser) -> None:
    """Adds what says how the target is called, and how its training step is made."""
    p.add_argument(
        "--loss", default="sum", metavar="NAME", help=f"{', '.join(LOSSES)}, or a function of the model's result (sum)"
    )
    p.add_argument("--optimizer", default="adamw", choices=[*OPTIMIZERS], help="default adamw")
    p.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="argument of the function (several times)"
    )


def check_loss(name: str) -> None:
    """
    Raises:
        TargetError: there is no such loss.
    """
    if name not in LOSSES and ":" not in name:
        raise TargetError(f"--loss {name} is none of {', '.join(LOSSES)}, nor script.py:function")


def main(argv: Sequence[str], program: str = "dtensor-compile plan") -> int:
    """Runs the command; returns the exit status."""
    return main_of(parser(program), argv, _command, _SCRIPT)


def _command(args: argparse.Namespace) -> int:
    if args.html is not None:
        require_plotly()  # an error now, and not after minutes
    return _sweep(args) if args.sweep else _run(args)


def _run(args: argparse.Namespace) -> int:
    check_loss(args.loss)
    base = _read(args.compare) if args.compare else None
    limits = PlanLimits.parse(base, args.max_memory, args.max_step)
    this = Job(parse_mesh_argument(args.mesh) if args.mesh else (), args.world, args.rank)
    settings = StepSettings(args.loss, args.optimizer, args.clip, args.blocks)
    plan = make_plan(
        args.target,
        this,
        gpu=args.gpu,
        cluster=args.cluster,
        settings=settings,
        arguments=dict(map(argument_of, args.set)),
        script_arguments=args.rest,
    )
    if args.json is not None and args.json != "-":
        pathlib.Path(args.json).write_text(to_json(plan))
    for file, form in ((args.html, to_html), (args.trace, to_trace)):
        if file is not None:
            pathlib.Path(file).write_text(form(plan))
    if args.json == "-":
        print(to_json(plan))
    else:
        print_plan(plan, console_for())
        if base is not None:
            print_comparison(compare_plans(base, plan), console_for())
    lines = [] if plan.memory.fits else [f"the step does not fit into {plan.gpu}"]
    lines += limits.exceeded(plan)
    for line in lines:
        print(line, file=sys.stderr)
    return BROKEN if lines else OK


def argument_of(text: str) -> tuple[str, object]:
    """The name and the value of ``--set NAME=VALUE``."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise TargetError(f"--set {text}: an argument and its value, NAME=VALUE")
    return name, value_of(value)


def _read(file: str) -> StepPlan:
    try:
        return from_json(pathlib.Path(file).read_text())
    except FileNotFoundError:
        raise TargetError(f"there is no plan {file!r}: write one with --json {file}") from None
    except PlanFormatError as error:
        raise PlanFormatError(f"{file}: {error}") from None


def _sweep(args: argparse.Namespace) -> int:
    if is_script(args.target):
        raise TargetError(f"--sweep varies arguments of a function: name one, {args.target}:function")
    if args.trace is not None:
        raise TargetError("--trace is of one plan: leave --sweep out, or take --html")
    combined = combinations(
        [parse_sweep(text) for text in args.sweep], parse_mesh_argument(args.mesh) if args.mesh else ()
    )
    command = [args.target, "--gpu", args.gpu, "--loss", args.loss, "--optimizer", args.optimizer]
    command += ["--clip", str(args.clip), "--blocks", args.blocks, "--rank", str(args.rank)]
    command += [f"--set={text}" for text in args.set]
    command += ["--cluster", args.cluster] if args.cluster else []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("plans", total=len(combined))
        swept = run_sweep(combined, command, args.jobs or os.cpu_count() or 1, lambda done: progress.advance(bar))
    if args.json is not None:
        text = json.dumps([dataclasses.asdict(this) for this in swept], indent=1)
        if args.json == "-":
            print(text)
        else:
            pathlib.Path(args.json).write_text(text)
    if args.html is not None:
        pathlib.Path(args.html).write_text(sweep_to_html(swept))
    if args.json != "-":
        print_sweep(swept, console_for())
    return OK if any(this.plan is not None and this.plan.memory.fits for this in swept) else BROKEN
