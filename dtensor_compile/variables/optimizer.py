"""Optimizers: ``step()`` and ``zero_grad()`` become part of the region that contains them.

torch ends a graph before and after each step, because its own regions end at ``backward()`` anyway. Ours do not.
`OBJECTS` has the functions that are traced differently under our backend: the graph break around a step, the fused
steps, and the functions that create the state of a `GradScaler`.
"""

from __future__ import annotations

import functools
from typing import Any

from dtensor_compile.compat.dynamo.trackers.calls import handle_calls
from dtensor_compile.compat.dynamo.trackers.module_calls import handle_functions
from dtensor_compile.compat.dynamo.trackers.optimizer_trackers import (
    break_function,
    optimizers_in_the_region,
    read_step,
)
from dtensor_compile.compat.dynamo.trackers.scaler_steps import scaler_state, steps_of_scalers
from dtensor_compile.compat.dynamo.trackers.tracker_entries import Retrack
from dtensor_compile.compat.dynamo.untraced_steps import BreakAroundStep, FusedStep, fused_steps, step_count, traced

OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    (break_function, BreakAroundStep.retrack),
    (read_step, handle_calls(step_count)),
    (scaler_state, traced),
    *((function, FusedStep.retrack) for function in fused_steps()),
)
CONTEXTS = (optimizers_in_the_region, functools.partial(handle_functions, steps_of_scalers))
