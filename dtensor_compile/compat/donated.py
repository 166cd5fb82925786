"""Saved tensors that a compiled backward pass may write over, where the graph is retained for another one.

A backward pass of Inductor's uses tensors that its forward pass made and no one else sees ("donated buffers") for its own results.
torch refuses ``backward(retain_graph=True)`` then. Which tensors there are depends on the graph, and with it on the rank, so that
one rank could refuse while the others wait in a collective.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._prims_common import clone_preserve_strides

from dtensor_compile.compat.autograd_functions import BUILD, functions_built
from dtensor_compile.compat.hooks import hook, needs


@needs(
    "backward passes that retain the graph",
    BUILD,
    hook("torch._C._autograd:_get_current_graph_task_keep_graph"),
    hook("torch._prims_common:clone_preserve_strides", "x"),
    without="torch refuses them where a backward pass uses the memory of saved tensors",
)
@contextlib.contextmanager
def saved_tensors_are_kept() -> Iterator[None]:
    """While it is entered, functions built on this thread give a backward pass that retains the graph copies to write over."""
    with functions_built(after=_keep_saved_tensors):
        yield


def _keep_saved_tensors(compiled: Any, metadata: Any) -> None:
    """Changes a compiled ``torch.autograd.Function``: see `saved_tensors_are_kept`."""
    stock, lock = compiled._backward_impl, threading.Lock()
    donated: list[int] = []

    def run(ctx: Any, values: list[Any]) -> Any:
        # One that is compiled now, because it runs for the first time, is compiled to write over nothing.
        if torch._C._autograd._get_current_graph_task_keep_graph() and compiled.compiled_bw is not None:
            with lock:  # the list is emptied once, and torch then finds nothing to refuse
                donated.extend(metadata.bw_donated_idxs or ())
                metadata.bw_donated_idxs = []
            for i in donated:
                values[i] = clone_preserve_strides(values[i])
        return stock(ctx, values)

    compiled._backward_impl = staticmethod(run)
