"""Optimizers: ``step()`` and ``zero_grad()`` belong to the region that they are in.

torch ends a graph before and after each step, because its own regions end at ``backward()`` anyway. Ours do not.
`OBJECTS` are the functions that mean something else under our backend: the break around a step, the fused steps, what
makes the state of a `GradScaler`.
"""

from __future__ import annotations

import functools
from typing import Any

from dtensor_compile.compat.dynamo.calls import handle_calls
from dtensor_compile.compat.dynamo.module_calls import handle_functions
from dtensor_compile.compat.dynamo.optimizer_trackers import (
    BreakAroundStep,
    FusedStep,
    break_function,
    fused_steps,
    optimizers_in_the_region,
    read_step,
    scaler_state,
    step_count,
    steps_of_scalers,
    traced,
)
from dtensor_compile.compat.dynamo.tracing import Retrack

OBJECTS: tuple[tuple[Any, Retrack], ...] = (
    (break_function, BreakAroundStep.retrack),
    (read_step, handle_calls(step_count)),
    (scaler_state, traced),
    *((function, FusedStep.retrack) for function in fused_steps()),
)
CONTEXTS = (optimizers_in_the_region, functools.partial(handle_functions, steps_of_scalers))
