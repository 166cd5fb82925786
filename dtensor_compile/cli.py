"""The command ``dtensor-compile``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["report"]:
        from dtensor_compile.report import report_command as command

        return command.main(argv[1:])
    if argv[:1] == ["parity"]:
        from dtensor_compile.testing import parity_command as parity

        return parity.main(argv[1:])
    if argv[:1] == ["kernels"]:
        from dtensor_compile.report import kernels_command as kernels

        return kernels.main(argv[1:])
    if argv[:1] == ["build"]:
        from dtensor_compile.report import build_command

        return build_command.main(argv[1:])
    if argv[:1] == ["plan"]:
        from dtensor_compile.forecast import plan_command as plan

        return plan.main(argv[1:])
    if argv[:1] == ["place"]:
        from dtensor_compile.forecast import place_command

        return place_command.main(argv[1:])
    if argv[:1] == ["explain"]:
        from dtensor_compile.forecast import place_command

        return place_command.explain(argv[1:])
    parser = argparse.ArgumentParser(
        prog="dtensor-compile", description='tools around torch.compile(model, backend="dtensor")'
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "report", help="graph breaks, communication, reasons, and advice: dtensor-compile report --help"
    )
    commands.add_parser("parity", help="compares compiled with eager, on ranks: dtensor-compile parity --help")
    commands.add_parser("kernels", help="GPU code of a program, for an emulated GPU: dtensor-compile kernels --help")
    commands.add_parser(
        "build", help="compiles a program for all ranks of a job in advance: dtensor-compile build --help"
    )
    commands.add_parser(
        "plan", help="memory and time of a training step on a cluster that is not there: dtensor-compile plan --help"
    )
    commands.add_parser("place", help="placements for a training step, found for a mesh: dtensor-compile place --help")
    commands.add_parser(
        "explain", help="why a value has its placement, and what others cost: dtensor-compile explain --help"
    )
    demo = commands.add_parser(
        "demo", help="train a small Llama in eager, with stock Inductor and with this backend, and compare"
    )
    demo.add_argument("--ranks", type=int, default=2, help="number of processes on this machine (default 2)")
    demo.epilog = (
        "other options go to dtensor_compile.demo.train: --layout {tp,fsdp,2d}, --layers, --steps, --timed, --json FILE"
    )
    args, rest = parser.parse_known_args(argv)
    return run_demo(args.ranks, rest)


def run_demo(ranks: int, rest: list[str]) -> int:
    """Starts `ranks` processes of the demonstration on this machine and waits for them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # gloo warns on machines whose name does not resolve
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), **quiet, **os.environ}
    return subprocess.call([*command, "-m", "dtensor_compile.demo.train", *rest], env=environment)


if __name__ == "__main__":
    sys.exit(main())
