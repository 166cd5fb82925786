"""Peak memory of the steps of a plan besides the plan's input: results, buffers, intermediates.

Elements of a step, with n ranks, a local input of L elements, A of the result, B that the busiest rank sends:

    all_reduce       A
    reduce_scatter   2 n A               in the order of ranks, and received where that is how gloo reduces
                                         (`reduce_by_exchange.py`); (n+1) A where chunks of the input that lie behind
                                         each other are sent
    all_gather       2 n L               as it comes, and in order; A where chunks that lie behind each other are the
                                         result
    all_to_all       2 L, padded         sent and received, received and in order
    exchange         max(B, t A) + t A   of each of t terms: sent and received, received and put together
    others           A

A step also holds the result of the step before it, which may be a view of a buffer padded for a gather. Sizes are those
of the largest shards, so that all ranks count the same; symbolic ones count with their hints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from dtensor_compile.compat.dtensor.specs import Partial, Shard
from dtensor_compile.planner.exchange import changed_dims
from dtensor_compile.planner.problem import State, Step
from dtensor_compile.planner.shard_intervals import cutting
from dtensor_compile.planner.step_costs import local_elements, local_sizes

Sizes = tuple[int, ...]


class HeldMemory(NamedTuple):
    """Elements that a step holds at once besides its input, and elements of the buffer of its result."""

    most: int
    kept: int


#: Before the first step, whose input is that of the plan.
NOTHING = HeldMemory(0, 0)


def peak_elements(steps: Sequence[Step], mesh_shape: Sizes, shape: Sizes) -> HeldMemory:
    """Peak elements of one rank besides the input of the first of `steps`, and the memory of the last one."""
    most, kept = NOTHING
    for step in steps:
        held = held_by(step, mesh_shape, shape)
        most, kept = max(most, kept + held.most), held.kept
    return HeldMemory(most, kept)


@functools.lru_cache(maxsize=1 << 14)
def held_by(step: Step, mesh_shape: Sizes, shape: Sizes) -> HeldMemory:
    """Memory of one step on a tensor of `shape`."""
    n = math.prod(mesh_shape[i] for i in step.mesh_dims)
    result = local_elements(step.after, mesh_shape, shape)
    if step.kind == "reduce_scatter":
        return HeldMemory(
            (n + 1) * result if _is_in_order(step, step.after, mesh_shape, shape) else 2 * n * result, result
        )
    if step.kind == "all_gather":
        if _is_in_order(step, step.before, mesh_shape, shape):
            return HeldMemory(result, result)
        gathered = n * local_elements(step.before, mesh_shape, shape)
        return HeldMemory(2 * gathered, gathered)
    if step.kind == "all_to_all":
        sizes, target = local_sizes(step.before, mesh_shape, shape), step.after[step.mesh_dims[0]]
        assert isinstance(target, Shard)
        sizes[target.dim] = -(-sizes[target.dim] // n) * n
        return HeldMemory(2 * math.prod(sizes), math.prod(sizes))
    if step.kind == "exchange":
        summed = [
            mesh_shape[i]
            for i in step.mesh_dims
            if isinstance(step.before[i], Partial) and step.before[i] != step.after[i]
        ]
        return exchanged(step.elements, math.prod(summed), result)
    return HeldMemory(result, result)


def exchanged(sent: int, terms: int, result: int) -> HeldMemory:
    """Memory of an exchange."""
    return HeldMemory(max(sent, terms * result) + terms * result, result)


def _is_in_order(step: Step, cut: State, mesh_shape: Sizes, shape: Sizes) -> bool:
    """Whether the shards of `cut`, concatenated in rank order, are the tensor that the ranks of `step` hold
    together.
    """
    around = cutting(cut, 0)
    return (
        changed_dims(step.before, step.after, mesh_shape) == (0,)
        and step.mesh_dims == around[-len(step.mesh_dims) :]
        and all(type(cut[i]) is Shard for i in around)
        and shape[0] % math.prod(mesh_shape[i] for i in around) == 0
    )
