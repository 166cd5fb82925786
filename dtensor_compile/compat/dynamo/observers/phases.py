"""Observes the phases of torch's compilation, and the module of the program that each phase handles.

torch brackets its phases by events for its own traces (``dynamo_timed``): tracing of a frame, of the joint graph,
passes, lowering, scheduling, code generation, the compiler of the kernels. Inside of some of them it goes from module
to module, or from node to node of a graph, which has a module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.observers.module_names import module_name
from dtensor_compile.compat.patches import needs, patch

_BEGINS = patch("torch._dynamo.utils:ChromiumEventLogger.log_event_start", "self event_name ...")
_ENDS = patch("torch._dynamo.utils:ChromiumEventLogger.log_event_end", "self event_name ...")
_INLINES = patch("torch._dynamo.variables.nn_module:record_nn_module_stack", "module_key source tx mod")
_TRACES = patch("torch.fx.experimental.symbolic_shapes:PropagateUnbackedSymInts.run_node", "self n")
_LOWERS = patch("torch._inductor.graph:GraphLowering.run_node", "self n")
_WRITES_CPP = patch("torch._inductor.codegen.cpp:CppScheduling.codegen_node", "self node")
_WRITES_TRITON = patch("torch._inductor.codegen.simd:SIMDScheduling.codegen_node", "self node")


class PhaseWatcher(Protocol):
    """Receives begin and end of torch's phases, on the thread that compiles."""

    def begin(self, phase: str) -> None:
        """A phase of torch begins, inside of those that have not ended."""

    def begin_module(self, name: str) -> None:
        """torch works for a module, which has this name in Dynamo's graphs (empty: for none), in the same phase."""

    def end(self, name: str) -> None:
        """The phase or module that began last under that name ends, and all that are nested in it."""


@needs(
    "compile time by phase, in the report",
    _BEGINS,
    _ENDS,
    _INLINES,
    _TRACES,
    _LOWERS,
    _WRITES_CPP,
    _WRITES_TRITON,
    without="the report has no compile time by stage and by module",
    upstream="not reported: an extension point, torch writes these events to files of its own",
    remove_when="torch has a listener for the phases of its compilation",
)
@contextlib.contextmanager
def watch_phases(watcher: PhaseWatcher) -> Iterator[None]:
    """While active, `watcher` receives the phases of every compilation in this process."""

    def begins(stock: Any, self: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
        watcher.begin(event_name)
        return stock(self, event_name, *args, **kwargs)

    def ends(stock: Any, self: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
        watcher.end(event_name)
        return stock(self, event_name, *args, **kwargs)

    @contextlib.contextmanager
    def inlines(stock: Any, module_key: str, source: Any, *args: Any) -> Iterator[None]:
        with _for_module(watcher, source.name), stock(module_key, source, *args):
            yield

    def runs(stock: Any, self: Any, n: torch.fx.Node) -> Any:
        with _for_module(watcher, module_name(n)):
            return stock(self, n)

    def writes(stock: Any, self: Any, node: Any) -> Any:
        with _for_module(watcher, _module_of_kernel(node)):
            return stock(self, node)

    rows = ((_BEGINS, begins), (_ENDS, ends), (_INLINES, inlines), (_TRACES, runs), (_LOWERS, runs))
    with contextlib.ExitStack() as stack:
        for row, replacement in (*rows, (_WRITES_CPP, writes), (_WRITES_TRITON, writes)):
            stack.enter_context(patched(row, replacement, every_thread=True))
        yield


@contextlib.contextmanager
def _for_module(watcher: PhaseWatcher, name: str) -> Iterator[None]:
    watcher.begin_module(name)
    try:
        yield
    finally:
        watcher.end(name)


def _module_of_kernel(kernel: Any) -> str:
    """The module of the first node that a kernel computes."""
    origins = (origin for part in kernel.get_nodes() for origin in getattr(part.node, "origins", ()))
    return next(filter(None, map(module_name, origins)), "")
