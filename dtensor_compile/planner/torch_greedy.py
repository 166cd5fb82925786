"""torch's own greedy plan, which bounds the plans of this package.

In: specs on one mesh. Out: the steps that torch takes, mesh dim by mesh dim. They include all_to_all, which torch
replaces by an all_gather on CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard, StridedShard
from dtensor_compile.planner.problem import Problem, State, Step, changed
from dtensor_compile.planner.shard_intervals import CUTS
from dtensor_compile.planner.step_costs import StepKind


def torch_steps(problem: Problem) -> tuple[Step, ...] | None:
    """The steps; None if torch refuses the change, or shards are strided, for which torch's plan is wrong."""
    if any(isinstance(p, StridedShard) for p in (*problem.start, *problem.goal)):
        return None
    state, steps = problem.start, []
    for i, target in _path(problem.start, problem.goal):
        if isinstance(target, Partial) and not isinstance(state[i], Replicate):
            return None
        after = changed(state, {i: target})
        steps.append(problem.step(_kind(state[i], target), (i,), state, after))
        state = after
    return tuple(steps)


def _path(start: State, goal: State) -> Iterator[tuple[int, Placement]]:
    """Mesh dim and new placement of each step: from the innermost mesh dim outwards those that can change at once (a
    shard that would nest differently in the goal is gathered), then from the outermost inwards the rest.
    """
    state = list(start)
    if any(isinstance(p, Shard) for p in start):
        for i in reversed(range(len(state))):
            target = goal[i]
            if isinstance(target, Shard):
                outer = [[p == target for p in placements[:i]] for placements in (state, goal)]
                if outer[0] != outer[1]:
                    target = Replicate()
            if state[i] != target:
                yield i, target
                state[i] = target
    for i, target in enumerate(goal):
        if state[i] != target:
            yield i, target


def _kind(source: Placement, target: Placement) -> StepKind:
    if isinstance(source, Partial):
        return "reduce_scatter" if isinstance(target, CUTS) else "all_reduce"
    if isinstance(source, CUTS):
        return "all_to_all" if isinstance(target, CUTS) else "all_gather"
    return "slice" if isinstance(target, CUTS) else "partition"
