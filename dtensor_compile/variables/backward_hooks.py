"""Backward passes that the program runs itself, and hooks on gradients.

``backward()`` and ``torch.autograd.grad`` inside a region become part of its graph, and so do backward hooks of
modules."""

from __future__ import annotations

from typing import Any

import torch

from dtensor_compile.compat.dynamo.backward import TracedGrad, backward_in_the_region
from dtensor_compile.compat.dynamo.module_hooks import TracedModuleHooks, hooks_in_the_graph
from dtensor_compile.compat.dynamo.trackers.calls import handle_calls
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.trackers.version_counters import versions_preserved_in_the_region

OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    (torch.autograd.grad, TracedGrad.retrack),
    (torch.utils.hooks.BackwardHook, handle_calls(TracedModuleHooks.make)),
)
CONTEXTS = (backward_in_the_region, hooks_in_the_graph, versions_preserved_in_the_region)
