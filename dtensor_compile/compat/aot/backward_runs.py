"""Hooks around runs of a compiled backward, and ``retain_graph=True`` for it.

A backward of Inductor's writes over tensors that only its forward made and saved ("donated buffers"). torch then
refuses ``backward(retain_graph=True)``. Which tensors are donated depends on the graph, and with it on the rank, so one
rank could refuse while the others wait in a collective.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._prims_common import clone_preserve_strides

from dtensor_compile.compat.aot.autograd_functions import BUILD, functions_built
from dtensor_compile.compat.dynamo.left_to_python import leave_frames_to_python
from dtensor_compile.compat.patches import hook, needs


@needs(
    "backward passes that retain the graph",
    *BUILD,
    hook("torch._C._autograd:_get_current_graph_task_keep_graph"),
    hook("torch._prims_common:clone_preserve_strides", "x", "x base"),
    without="torch refuses them if a backward pass reuses the memory of saved tensors, and ranks do not compare their "
    "backward passes",
    upstream="not reported: torch refuses them on purpose if it writes over saved tensors",
    remove_when="a backward with retain_graph=True gets copies of donated buffers, and a hook sees the function first",
)
@contextlib.contextmanager
def backward_runs(
    begin: Callable[[], None], failed: Callable[[Exception], None], ended: Callable[[Exception | None], None]
) -> Iterator[None]:
    """While active, functions built on this thread copy donated buffers for a backward that retains the graph.

    Args:
        begin: called before the first run of a backward that is already compiled; if it raises, the run fails, and the
            next run calls it again.
        failed: called with the error if a backward is compiled on its first run and that fails.
        ended: called after a run of the backward: with None after the first that succeeds, with the error after each
            that fails.
    """
    with functions_built(after=lambda compiled, metadata: _watch(compiled, metadata, begin, failed, ended)):
        yield


def _watch(
    compiled: Any,
    metadata: Any,
    begin: Callable[[], None],
    failed: Callable[[Exception], None],
    ended: Callable[[Exception | None], None],
) -> None:
    """Patches a compiled ``torch.autograd.Function``; see `backward_runs`."""
    stock, lock, began, ran = compiled._backward_impl, threading.Lock(), False, False
    donated: list[int] = []

    def run(ctx: Any, values: list[Any]) -> Any:
        nonlocal began, ran
        if compiled.compiled_bw is not None:  # else it is compiled now, without donated buffers if it retains the graph
            if not began:
                begin()
                began = True
            if torch._C._autograd._get_current_graph_task_keep_graph():
                with lock:  # emptied once, so that torch finds no reason to refuse
                    donated.extend(metadata.bw_donated_idxs or ())
                    metadata.bw_donated_idxs = []
                for i in donated:
                    values[i] = clone_preserve_strides(values[i])
        try:
            results = stock(ctx, values)
        except Exception as error:
            (failed if compiled.compiled_bw is None else ended)(error)
            raise
        if not ran:
            ended(None)
            ran = True
        return results

    leave_frames_to_python(run)
    compiled._backward_impl = staticmethod(run)
