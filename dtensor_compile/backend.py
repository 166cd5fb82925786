"""The ``"dtensor"`` backend, which runs the stages in order, and ``"dtensor_aten"``, the same without Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor_compile.compat.dynamo.tracing import at_failed_frames
from dtensor_compile.compat.inductor.compile import compile_as_stock
from dtensor_compile.compat.patches import warn_of_untried_release
from dtensor_compile.graph.runner import run_steps
from dtensor_compile.options import Options
from dtensor_compile.recording.graph_log import GraphLog
from dtensor_compile.runtime.collective_agreement import Agreement
from dtensor_compile.runtime.failed_frames import frame_failed
from dtensor_compile.spmd import trackers as of_annotations
from dtensor_compile.stages import program
from dtensor_compile.stages.compilation import Compilation
from dtensor_compile.stages.compiling import compile_program
from dtensor_compile.variables import install_trackers


def dtensor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph over DTensors; ``torch.compile(model, backend="dtensor")`` calls it.

    Args:
        gm: graph of torch functions, with DTensor values.
        example_inputs: fake inputs.
        mode, options: as passed to ``torch.compile``; see `dtensor_compile.options.Options`.

    Raises:
        OptionError: an unknown option or a wrong value.
        NoProcessGroupError, MeshError: the program cannot run in this process.
        AgreementError: it calls other collectives on another rank.
        PlanError: a redistribution needs more memory than ``redistribution_memory``.
    """
    agreement = Agreement.of_frame()
    with agreement.announcing_failures():
        opts = Options.parse(mode, options)
        this = Compilation(gm, example_inputs, opts, agreement, GraphLog(opts.topology))
        run_steps(gm, program.ALWAYS, this)
        if not opts.capture:
            return compile_as_stock(gm, example_inputs, opts.inductor)
        run_steps(gm, program.CAPTURED, this)
        compiled = compile_program(this)
        agreement.reach()
        return program.wrap_compiled(compiled, this)


def dtensor_aten(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`dtensor` with ``options={"kernels": "aten"}``: compiles fast, runs like eager; for tests and debugging."""
    return dtensor(gm, example_inputs, mode=mode, options={**(options or {}), "kernels": "aten"})


for _backend in (dtensor, dtensor_aten):
    install_trackers(_backend, of_annotations.OBJECTS, of_annotations.CONTEXTS)

at_failed_frames(frame_failed)
warn_of_untried_release()
