"""Runs of a compiled backward pass: who is told of the first, and what a pass gets that retains the graph for another
one.

A backward pass of Inductor's uses tensors that its forward pass made and no one else sees ("donated buffers") for its
own results. torch refuses ``backward(retain_graph=True)`` then. Which tensors there are depends on the graph, and with
it on the rank, so that one rank could refuse while the others wait in a collective.
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
    without="torch refuses them where a backward pass uses the memory of saved tensors, and ranks do not compare their "
    "backward passes",
    upstream="not reported: torch refuses them on purpose, where it writes over saved tensors",
    remove_when="a backward with retain_graph=True gets copies of donated buffers, and a hook sees the function first",
)
@contextlib.contextmanager
def backward_runs(
    begin: Callable[[], None], failed: Callable[[Exception], None], ended: Callable[[Exception | None], None]
) -> Iterator[None]:
    """While it is entered, functions built on this thread give a backward pass that retains the graph copies to write
    over.

    Args:
        begin: called before a backward pass that is compiled already runs for the first time; an error of its own ends
            that run, and the next one calls it again.
        failed: told of the error where a backward pass is compiled when it first runs, and cannot be.
        ended: called after the first run of a backward pass, with the error if it raised.
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
    """Changes a compiled ``torch.autograd.Function``: see `backward_runs`."""
    stock, lock, began, ran = compiled._backward_impl, threading.Lock(), False, False
    donated: list[int] = []

    def run(ctx: Any, values: list[Any]) -> Any:
        nonlocal began, ran
        if (
            compiled.compiled_bw is not None
        ):  # else it is compiled now, and where it retains the graph, to write over nothing
            if not began:
                begin()
                began = True
            if torch._C._autograd._get_current_graph_task_keep_graph():
                with lock:  # the list is emptied once, and torch then finds nothing to refuse
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
