"""``dtensor-compile report TARGET``: reports graph breaks, communication, reasons, and advice for a program.

Exit status: 0; 1 if a limit is exceeded, with the contributing lines; 2 if the program could not be analyzed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

from dtensor_compile.errors import DTensorCompileError
from dtensor_compile.report.chrome_trace import to_trace
from dtensor_compile.report.compare_reports import Limits, broken, check_limits, compare
from dtensor_compile.report.explain import KERNELS
from dtensor_compile.report.html import to_html
from dtensor_compile.report.model import Report, ReportFormatError, from_json, to_json
from dtensor_compile.report.run_target import DEFAULT_WORLD, STOCK_RANKS, Job, parse_mesh_argument, report_target
from dtensor_compile.report.script_arguments import options_parser, parsed, usage
from dtensor_compile.report.table import console_for, print_comparison, print_report
from dtensor_compile.report.target import TargetError
from dtensor_compile.topology.links import CLUSTERS

OK, BROKEN, NOT_RUN = 0, 1, 2


def parser(program: str) -> argparse.ArgumentParser:
    """The parser of the options, without the target."""
    p = options_parser(program)
    job = p.add_argument_group("the job")
    job.add_argument("--mesh", metavar="4x2", help="mesh for a function that takes one; with names: dp=4,tp=2")
    job.add_argument(
        "--world", type=int, metavar="N", help=f"ranks of the simulation (default: of --mesh, else {DEFAULT_WORLD})"
    )
    job.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to look from (default 0)")
    job.add_argument("--real", action="store_true", help="use the ranks of a real job, under torchrun; rank R prints")
    times = "machine for which times are estimated (default: by what the program computes on)"
    job.add_argument("--cluster", choices=CLUSTERS, help=times)
    how = p.add_argument_group("how to look")
    how.add_argument(
        "--stock",
        action=argparse.BooleanOptionalAction,
        help=f"compare with stock torch, whose graphs grow with the mesh (default: up to {STOCK_RANKS} ranks)",
    )
    how.add_argument("--no-backward", action="store_true", help="leave out the backward pass of the model's results")
    default = "default aten; inductor with --profile"
    how.add_argument("--kernels", choices=KERNELS, help=f"aten compiles fast; inductor as in use ({default})")
    profile = "also measure compile time, by stage and by layer, with empty caches"
    how.add_argument("--profile", action="store_true", help=profile)
    out = p.add_argument_group("what to write")
    out.add_argument("--all", action="store_true", help="every row of every table")
    out.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - for standard output, instead of tables"
    )
    out.add_argument("--html", metavar="FILE", help="write the report as one self-contained HTML file")
    out.add_argument("--trace", metavar="FILE", help="write the timeline in Chrome's format, for ui.perfetto.dev")
    out.add_argument("--save", metavar="FILE", help="write the report as JSON, as a base for --compare")
    out.add_argument("--compare", metavar="BASE", help="show what changed since a base")
    out.add_argument("--verbose", action="store_true", help="the traceback of an error, and what the program prints")
    limits = p.add_argument_group("limits (exit status 1 if one is exceeded)")
    limits.add_argument("--max-breaks", metavar="N", help="graph breaks, each place and cause once")
    limits.add_argument("--max-bytes", metavar="10MB|+0%%", help="bytes that this rank sends; in percent over the base")
    limits.add_argument("--max-exposed", metavar="10ms|+0%%", help="time in which nothing computes")
    return p


_SCRIPT = "A script is run as it is, and every torch.compile in it is reported."


def main(argv: Sequence[str], program: str = "dtensor-compile report") -> int:
    """Runs the command; returns the exit status."""
    return main_of(parser(program), argv, _run, _SCRIPT)


def main_of(
    options: argparse.ArgumentParser, argv: Sequence[str], run: Callable[[argparse.Namespace], int], script: str
) -> int:
    """Runs a command that takes a target; returns the exit status.

    Args:
        script: handling of a script, for ``--help``.
    """
    try:
        args = parsed(options, argv)
    except TargetError as error:
        print(f"{options.prog}: {error}", file=sys.stderr)
        return NOT_RUN
    if args.help or args.target is None:
        print(usage(options, script))
        return OK if args.help else NOT_RUN
    return status_of(run, args, options.prog)


def status_of(run: Callable[[argparse.Namespace], int], args: argparse.Namespace, program: str) -> int:
    """The exit status of a command. An error with a message for the user is printed in one line, with `args.verbose`
    after its traceback.
    """
    try:
        return run(args)
    except (DTensorCompileError, OSError) as error:
        if args.verbose:
            traceback.print_exception(error)
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return NOT_RUN


def _run(args: argparse.Namespace) -> int:
    limits = Limits(args.max_breaks, args.max_bytes, args.max_exposed)
    base = _read(args.compare) if args.compare else None
    check_limits(limits, base)
    mesh = parse_mesh_argument(args.mesh) if args.mesh else ()
    job = Job(mesh, args.world, args.rank, args.real)
    with _quiet(not args.verbose):
        report = report_target(
            args.target,
            args.rest,
            job=job,
            stock=args.stock,
            backward=not args.no_backward,
            cluster=args.cluster or (base.cluster if base and base.cluster in CLUSTERS else None),
            kernels=args.kernels or ("inductor" if args.profile else "aten"),
            profile=args.profile,
        )
    if report.rank == args.rank:
        _write(report, base, args)
    offending = broken(limits, report, base)
    for line in offending if report.rank == args.rank else ():
        print(line, file=sys.stderr)
    if report.ours.failed:
        raise TargetError(f"{args.target} raises: {report.ours.failed}")
    return BROKEN if offending else OK


def _write(report: Report, base: Report | None, args: argparse.Namespace) -> None:
    for file in {args.json, args.save} - {None, "-"}:
        pathlib.Path(file).write_text(to_json(report))
    for file, form in ((args.html, to_html), (args.trace, to_trace)):
        if file is not None:
            pathlib.Path(file).write_text(form(report), encoding="utf-8")
    if args.json == "-":
        print(to_json(report))
        return
    console = console_for()
    print_report(report, console, everything=args.all)
    if base is not None:
        print_comparison(compare(base, report), console)


def _read(file: str) -> Report:
    try:
        return from_json(pathlib.Path(file).read_text())
    except FileNotFoundError:
        raise TargetError(f"there is no base {file!r}: write one with --save {file}") from None
    except ReportFormatError as error:
        raise ReportFormatError(f"{file}: {error}") from None


@contextlib.contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Context that keeps output of the program out of the report."""
    if not quiet:
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()):
        yield
