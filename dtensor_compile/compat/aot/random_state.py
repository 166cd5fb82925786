"""Operators that draw random numbers, and those of higher order that run one with a state of the generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

#: Operators of higher order that run an operator with a state of the random generator, which checkpointing needs: the
#: position of that operator among their arguments, and whether they return the state before its result.
WITH_RANDOM_STATE: Mapping[str, tuple[int, bool]] = {
    "run_and_save_rng_state": (0, True),
    "run_with_rng_state": (1, False),
    "graphsafe_run_with_rng_state": (0, False),
}


#: Key in ``node.meta`` of a call of a graph: whether that draws.
DRAWS = "dtensor_compile_draws"


def takes_random_state(target: Any) -> bool:
    """Whether an operator is one of `WITH_RANDOM_STATE`."""
    return isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ in WITH_RANDOM_STATE


def saves_state(target: Any) -> bool:
    """Whether an operator that `takes_random_state` returns the state before its result."""
    return WITH_RANDOM_STATE[target.__name__][1]


def draws(target: Any) -> bool:
    """Whether an operator draws random numbers from torch's generator, or sets its state."""
    return takes_random_state(target) or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def node_draws(node: torch.fx.Node) -> bool:
    """Whether a node draws random numbers from torch's generator, or calls a graph that does."""
    return draws(node.target) or bool(node.meta.get(DRAWS))


def without_state(target: Any, args: Any, result: Any, kwargs: Mapping[str, Any] = {}) -> tuple[Any, Any, Any, Any]:
    """A call of an operator with a state of the random generator as the call of the operator itself: its target,
    arguments, result and named arguments; other calls as they are."""
    if not takes_random_state(target):
        return target, args, result, kwargs
    place, saves = WITH_RANDOM_STATE[target.__name__]
    named = {name: value for name, value in kwargs.items() if name != "rng_state"}
    return args[place], args[place + 1 :], result[1] if saves else result, named
