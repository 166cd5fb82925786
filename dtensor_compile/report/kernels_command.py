"""``dtensor-compile kernels TARGET``: the GPU code of a program, compiled for an emulated GPU.

Prints the order of kernels, starts and waits of each graph, then registers, shared memory and spills of each Triton
kernel. Exit status: 0; 1 if a kernel does not compile, or has more spills than allowed; 2 if the program could not be
compiled."""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import sys
from collections.abc import Sequence

import torch

from dtensor_compile.compat import pytree
from dtensor_compile.compat.dynamo.observers.observe import uncompiled
from dtensor_compile.offline.emulated_device import EmulatedDevice, device
from dtensor_compile.offline.simulated_job import job
from dtensor_compile.recording.recorder import record
from dtensor_compile.report.recorded import run_backward
from dtensor_compile.report.report_command import BROKEN, OK, status_of
from dtensor_compile.report.run_target import Job, mesh_of, parse_mesh_argument
from dtensor_compile.report.target import (
    TargetError,
    TargetProgram,
    call_target,
    function_of,
    is_script,
    program_of,
    users_program,
)
from dtensor_compile.topology.gpus import GPUS


def parser(program: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=program, description=__doc__.partition("\n\n")[2])  # type: ignore[union-attr]
    p.add_argument(
        "target", help="package.module:function or script.py:function, as for report; its tensors are moved to the GPU"
    )
    p.add_argument(
        "--gpu", default="h200", metavar="NAME|FILE", help=f"{', '.join(GPUS)}, or a TOML or JSON file (default h200)"
    )
    p.add_argument("--mesh", metavar="4x2", help="mesh for a function that takes one; with names: dp=4,tp=2")
    p.add_argument("--world", type=int, metavar="N", help="ranks of the simulated job (default: of --mesh, else 2)")
    p.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to look from (default 0)")
    p.add_argument("--no-backward", action="store_true", help="leave out the backward pass of the model's results")
    p.add_argument("--save", metavar="FOLDER", help="write generated code, and source, PTX and cubin of each kernel")
    p.add_argument("--max-spills", type=int, metavar="BYTES", help="largest spills of a kernel, in bytes per thread")
    p.add_argument("--verbose", action="store_true", help="the traceback of an error, and what the program prints")
    return p


def main(argv: Sequence[str], program: str = "dtensor-compile kernels") -> int:
    """Runs the command; returns the exit status."""
    return status_of(_run, parser(program).parse_args(argv), program)


def _run(args: argparse.Namespace) -> int:
    if is_script(args.target):
        raise TargetError(
            f"{args.target}: kernels takes a function, script.py:function, that returns a model and its inputs"
        )
    this = Job(parse_mesh_argument(args.mesh) if args.mesh else (), args.world)
    printed = contextlib.nullcontext() if args.verbose else contextlib.redirect_stdout(io.StringIO())
    with job(this.ranks, args.rank), device(args.gpu) as gpu, record() as recording, printed:
        found = program_of(call_target(function_of(args.target), args.target, lambda: mesh_of(this, "cuda")))
        if found is None:
            raise TargetError(f"{args.target} returns neither a model and its inputs nor a step to call")
        with users_program(args.target):
            on_the_gpu = _on_the_gpu(found)
            out = on_the_gpu.call(torch.compile(uncompiled(on_the_gpu.model), backend="dtensor"))
            if not args.no_backward:
                run_backward(out)
    failed = [decision.reason for decision in recording.decisions if decision.kind == "uncompiled_kernels"]
    for number, graph in enumerate(gpu.graphs):
        print(f"graph {number}, {graph.direction}\n\n{graph.order()}")
    print(gpu.table(), end="")
    if args.save:
        save_kernels(gpu, pathlib.Path(args.save))
    if args.max_spills is not None:
        spilling = [kernel for kernel in gpu.kernels if kernel.binary.spills > args.max_spills]
        failed += [
            f"{kernel.name} spills {kernel.binary.spills} bytes, more than {args.max_spills}" for kernel in spilling
        ]
    for line in failed:
        print(line, file=sys.stderr)
    return BROKEN if failed else OK


def _on_the_gpu(program: TargetProgram) -> TargetProgram:
    """The program with its model and its inputs on the GPU."""
    if isinstance(program.model, torch.nn.Module):
        program.model.to("cuda")
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to("cuda"), (program.args, program.kwargs))
    return TargetProgram(program.model, args, kwargs)


def save_kernels(gpu: EmulatedDevice, folder: pathlib.Path) -> None:
    """Writes ``0_forward.py`` and so on, and for each kernel of a graph ``0_NAME.py``, ``.ptx`` and ``.cubin``."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, graph in enumerate(gpu.graphs):
        (folder / f"{number}_{graph.direction}.py").write_text(graph.source)
        for kernel in graph.kernels:
            name = folder / f"{number}_{kernel.name}"
            name.with_name(f"{name.name}.py").write_text(kernel.source)
            name.with_name(f"{name.name}.ptx").write_text(kernel.binary.ptx)
            name.with_name(f"{name.name}.cubin").write_bytes(kernel.binary.cubin)
