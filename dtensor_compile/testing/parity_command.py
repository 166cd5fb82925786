"""``dtensor-compile parity TARGET --mesh 2x2``: compares the compiled program with eager, and finds the cause of
differences.

The command starts the ranks itself, on gloo, runs on those of a job (``--real``, under ``torchrun``), or simulates all
of them in its own process (``--local``). Exit status: 0; 1 if compiled differs from eager, with the differences; 2 if
the program could not be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import pathlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.errors import DTensorCompileError
from dtensor_compile.report.run_target import DEFAULT_WORLD, Job, parse_mesh_argument, running
from dtensor_compile.report.target import TargetError, call_target, function_of, is_script
from dtensor_compile.testing.check import bisect_case, compare_everywhere, describe, make_program
from dtensor_compile.testing.minify import MinifyError, minified_script
from dtensor_compile.testing.parity import Allowed, Case, Settings, sum_of_squares
from dtensor_compile.testing.ranks import RankError, make_mesh, run_on_ranks

EQUAL, DIFFERS, NOT_RUN = 0, 1, 2
_OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class RankAnswer:
    """Answer of a rank.

    Attributes:
        status: of the command.
        text: for the user.
        script: for ``--minify``.
    """

    status: int
    text: str
    script: str = ""


def parser(program: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=program, description="Runs a step in eager and compiled, on ranks, and compares all results."
    )
    p.add_argument(
        "target", help="package.module:function or script.py:function that returns a model and its inputs, or a step"
    )
    p.add_argument(
        "--mesh", metavar="2x2", default="", help="mesh for a function that takes one; with names: dp=2,tp=2"
    )
    p.add_argument("--world", type=int, metavar="N", help=f"ranks to start (default: of --mesh, else {DEFAULT_WORLD})")
    p.add_argument("--real", action="store_true", help="use the ranks of a real job, under torchrun")
    p.add_argument(
        "--local", action="store_true", help="start no ranks: all in this process, eager on torch's LocalTensor"
    )
    p.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds until the ranks are killed (default 600)"
    )
    p.add_argument("--calls", type=int, default=2, metavar="N", help="calls of the step (default 2)")
    p.add_argument(
        "--optimizer", choices=_OPTIMIZERS, help="steps after each call; parameters are compared after the last"
    )
    p.add_argument("--lr", type=float, default=1e-3, help="of the optimizer (default 1e-3)")
    p.add_argument("--no-backward", action="store_true", help="compare only the forward")
    p.add_argument(
        "--kernels", choices=("inductor", "aten"), default="inductor", help="as of the backend (default inductor)"
    )
    p.add_argument("--backend", default="dtensor", help="another backend (default dtensor)")
    p.add_argument("--dynamic", action=argparse.BooleanOptionalAction, help="for torch.compile")
    p.add_argument("--breaks", action="store_true", help="allow graph breaks")
    p.add_argument("--tolerance", type=float, metavar="X", help="largest relative difference (default: by dtype)")
    p.add_argument("--bisect", action="store_true", help="find the part of the compilation that causes the difference")
    p.add_argument("--minify", metavar="FILE", help="write the smallest part of the program that differs, as a script")
    p.add_argument("--verbose", action="store_true", help="what the ranks print, and tracebacks")
    return p


def main(argv: Sequence[str], program: str = "dtensor-compile parity") -> int:
    """Runs the command; returns the exit status."""
    args = parser(program).parse_args(argv)
    try:
        job = Job(parse_mesh_argument(args.mesh) if args.mesh else (), args.world, real=args.real)
        if is_script(args.target):
            where = f"{args.target}:function"
            raise TargetError(
                f"{args.target} is a script: name a function in it, {where}, that returns a model and inputs"
            )
        if args.real and args.local:
            raise TargetError("--real and --local exclude each other: the ranks are processes, or they are not")
        if args.local and args.minify:
            raise TargetError("--minify starts its own ranks: leave --local out, or use --bisect")
        if args.local:
            answer, first = _compare_here(args, job), True
        elif args.real:
            with running(job):
                answer = compare_target(args, job)
                first = dist.get_rank() == 0
        else:
            answer, first = run_on_ranks(job.ranks, compare_target, args, job, timeout=args.timeout)[0], True
    except (DTensorCompileError, RankError) as error:
        if args.verbose:
            raise
        text = str(error)
        print(f"{program}: {text if isinstance(error, RankError) else ' '.join(text.split())}", file=sys.stderr)
        return NOT_RUN
    if first:
        print(answer.text, file=sys.stderr if answer.status == NOT_RUN else sys.stdout)
        if args.minify and answer.script:
            pathlib.Path(args.minify).write_text(answer.script)
            print(f"{args.minify} reproduces it: python {args.minify}")
    return answer.status


def compare_target(args: argparse.Namespace, job: Job) -> RankAnswer:
    """Compares a target on the ranks of this job; runs on each of them."""
    with contextlib.nullcontext() if args.verbose else contextlib.redirect_stdout(io.StringIO()):
        try:
            return _compare(args, job)
        except TargetError as error:
            return RankAnswer(NOT_RUN, " ".join(str(error).split()))


def _compare_here(args: argparse.Namespace, job: Job) -> RankAnswer:
    """`compare_target` with all ranks in this process; an exception is reported as if it had ended a rank."""
    try:
        return compare_target(args, job)
    except DTensorCompileError:
        raise
    except Exception as error:
        raise RankError("".join(traceback.format_exception(error))) from error


def _compare(args: argparse.Namespace, job: Job) -> RankAnswer:
    ranks = job.ranks if args.local else dist.get_world_size()
    dims, world = job.mesh or (("tp", ranks),), ranks if args.local else None
    names, shape = tuple(name for name, _ in dims), tuple(size for _, size in dims)
    device = "cuda" if torch.cuda.is_available() and job.real else "cpu"
    function = function_of(args.target)

    def made() -> Any:
        return call_target(function, args.target, lambda: make_mesh(shape, names, device))

    case = Case(
        functools.partial(make_program, made),
        loss=None if args.no_backward else sum_of_squares,
        optimizer=_optimizer(args.optimizer, args.lr),
        calls=args.calls,
        allowed=Allowed(relative=args.tolerance),
    )
    options = {"kernels": args.kernels} if args.backend == "dtensor" and args.kernels != "inductor" else None
    settings = Settings(args.backend, not args.breaks, args.dynamic, options)
    try:
        comparison = compare_everywhere(case, settings, world)
    except TypeError as error:
        raise TargetError(f"{args.target}: {error}") from error
    details = f" in one process ({comparison.reference})" if args.local else ""
    steps = ""
    if args.optimizer and not args.no_backward:
        steps = f"steps of {args.optimizer} use eager's gradients where the compiled ones agree with them"
        details += f"; {steps}"
    if not comparison.differences:
        if not comparison.tensors:
            raise TargetError(f"{args.target} returns no tensor and modifies none: there is nothing to compare")
        return RankAnswer(
            EQUAL, f"equal: {comparison.tensors} tensors of {args.calls} calls on {ranks} ranks" + details
        )
    culprit = bisect_case(case, settings, world) if args.bisect or args.minify else None
    text, script = "\n".join(filter(None, (describe(comparison.differences, culprit), steps))), ""
    if args.minify:
        try:
            script = minified_script(case, culprit.differing if culprit else settings, shape, names)
        except MinifyError as error:
            text += f"\nnot minified: {error}"
    return RankAnswer(DIFFERS, text, script)


def _optimizer(name: str | None, lr: float) -> Any:
    if name is None:
        return None
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    return functools.partial(made, lr=lr)
