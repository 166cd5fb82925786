"""Runs a graph operator by operator if one of its Inductor kernels does not compile.

Errors of compilers are not errors in passes or in Inductor itself, which abort the compilation: they are C++ compile
errors, Triton's errors, or raised through Triton. The graph that runs instead is our lowered one, before Inductor
changes it, as with ``kernels="aten"``. Its collectives are those that the ranks agreed on.
"""

from __future__ import annotations

import os
import pathlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext
from torch._inductor.output_code import OutputCode

from dtensor_compile.compat.aot.fx import run_boxed

#: Number of lines at the end of a compiler's message that are reported.
LAST_LINES = 3


class LoweredGraph:
    """The graph that is being compiled, as our lowering left it."""

    def __init__(self) -> None:
        self._copy: tuple[torch.fx.GraphModule, torch.fx.Graph] | None = None

    def keep(self, graph: torch.fx.Graph) -> None:
        assert graph.owning_module is not None
        copy = torch.fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        self._copy = graph.owning_module, copy

    def forget(self) -> None:
        self._copy = None

    def module(self) -> torch.fx.GraphModule | None:
        """The graph, with code that runs it, which is only made here; None if none is kept."""
        return self._copy and torch.fx.GraphModule(*self._copy)


@dataclass
class _Operators(OutputCode):
    """The compiled form of a graph whose kernels did not compile."""

    run: Any = None
    _boxed_call: bool = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.run(inputs)

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        pass

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        pass


def run_uncompiled(
    compile_graph: Callable[..., Any], lowered: LoweredGraph, on_failure: Callable[[str, str], None]
) -> Callable[..., Any]:
    """`compile_graph` (Inductor's), whose result runs operator by operator if a kernel does not compile.

    Args:
        lowered: keeps each graph once it is lowered.
        on_failure: called with the graph (``"forward"``, ``"backward"``) and the last lines of the compiler's message.
    """

    def compile_or_run(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        lowered.forget()
        try:
            return compile_graph(gm, example_inputs, **kwargs)
        except Exception as error:
            output = compiler_output(getattr(error, "inner_exception", error))
            if output is None or (module := lowered.module()) is None:
                raise
            on_failure("backward" if kwargs.get("is_backward") else "forward", output)
            context = TracingContext.try_get()
            if context is not None and context.output_strides:
                context.output_strides.clear()  # these belong to the kernels; operators have the strides of the graph
            return _Operators(run=run_boxed(module))
        finally:
            lowered.forget()

    return compile_or_run


def run_lowered(lower: Callable[[torch.fx.Graph], None]) -> Callable[..., Any]:
    """In place of Inductor: lowers a graph, and runs it operator by operator."""

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        lower(gm.graph)
        gm.recompile()
        return _Operators(run=run_boxed(gm))

    return compile_graph


def run_made(made: Callable[[torch.fx.GraphModule], Callable[[list[Any]], Any]]) -> Callable[..., Any]:
    """In place of Inductor: a graph runs as the boxed function that `made` makes of it."""

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        return _Operators(run=made(gm))

    return compile_graph


def compiler_output(error: BaseException) -> str | None:
    """The last lines of a compiler's message; None if the error is not a compiler's."""
    from torch._inductor.compile_worker.subproc_pool import SubprocException
    from torch._inductor.exc import CppCompileError
    from torch._inductor.runtime.triton_heuristics import NoTritonConfigsError

    if isinstance(error, CppCompileError):
        text = error.output
    elif isinstance(error, (NoTritonConfigsError, SubprocException)) or _went_through_triton(error):
        text = str(error)
    else:
        return None
    lines = [" ".join(line.split()) for line in text.splitlines() if any(c.isalnum() for c in line)]
    return " / ".join(lines[-LAST_LINES:]) or "the compiler failed without a message"


def _went_through_triton(error: BaseException) -> bool:
    try:
        import triton
    except ImportError:
        return False
    folder = str(pathlib.Path(triton.__file__).parent) + os.sep
    return any(frame.filename.startswith(folder) for frame in traceback.extract_tb(error.__traceback__))
