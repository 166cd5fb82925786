"""The order in which ``fully_shard`` itself would run the tasks of a graph, and its peak memory.

In: tasks in topological order, and the starts of a wrapper's gathers and reductions. Out: another topological order.

    given     gather a; wait a; mm a; gather b; wait b; mm b; reduce b; wait; reduce a; wait
    wrapper   gather a; wait a; gather b; mm a; wait b; mm b; reduce b; ...; wait; reduce a; wait

In eager each wrapped module gathers its parameters while the one before it computes, forward and backward, and a
reduction is waited for when the next one starts (`torch.distributed.fsdp`, prefetching). At any time two modules have
unsharded parameters, and one reduction holds its input. A user who wraps a model accepts this much memory: a memory
bound is relative to this peak if the compiler's own order, which waits at once, has a lower one.

This order is only simulated, never run: it may start collectives in another order than other ranks do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dtensor_compile.schedule.simulated_device import Simulation, Task, simulate


def wrapper_peak(tasks: Sequence[Task], wrapped: Mapping[int, bool]) -> int:
    """Peak bytes of the wrapper's own order; 0 without a wrapper.

    Args:
        wrapped: starts of collectives of a wrapper, and whether they reduce.
    """
    return simulate_wrapper(tasks, wrapped).peak if wrapped else 0


def simulate_wrapper(tasks: Sequence[Task], wrapped: Mapping[int, bool]) -> Simulation:
    """Simulates the wrapper's own order; `wrapped` is as for `wrapper_peak`."""
    gathers = {index for index, reduces in wrapped.items() if not reduces}
    return simulate(tasks, wrapper_order(tasks, gathers, wrapped.keys() - gathers))


def wrapper_order(tasks: Sequence[Task], gathers: Collection[int], reductions: Collection[int]) -> list[int]:
    """The order of a wrapper.

    Args:
        tasks: in an order in which they may run.
        gathers, reductions: starts of collectives of the wrapper; other starts are waited for at once.
    """
    wrapper = _Wrapper(tasks, gathers, reductions)
    for index, task in enumerate(tasks):
        if task.waits_for is None and index not in gathers:
            wrapper.run(index)
            if task.link is not None and index not in reductions:
                for wait in wrapper.waits.get(index, ()):
                    wrapper.run(wait)
    for index in range(len(tasks)):
        wrapper.run(index)
    return wrapper.order


class _Wrapper:
    """One pass over the tasks, in the order in which a wrapper's hooks would run them."""

    def __init__(self, tasks: Sequence[Task], gathers: Collection[int], reductions: Collection[int]) -> None:
        self.tasks, self.reductions = tasks, reductions
        self.waits: dict[int, list[int]] = {}
        first_use: dict[int, int] = {}
        for index, task in enumerate(tasks):
            if task.waits_for is not None:
                self.waits.setdefault(task.waits_for, []).append(index)
                continue
            for before in task.after:
                start = tasks[before].waits_for
                if start is not None and start in gathers:
                    first_use.setdefault(start, index)
        in_turn = sorted(first_use, key=first_use.__getitem__)
        self.following = dict(zip(in_turn, in_turn[1:]))
        self.done = [False] * len(tasks)
        self.order: list[int] = []
        self.reduced: list[int] = []

    def run(self, wanted: int) -> None:
        """Runs a task after its dependencies. If that waits for a gather, the next one starts."""
        stack = [wanted]
        while stack:
            index = stack[-1]
            missing = [] if self.done[index] else self._missing(index)
            if missing:
                stack += missing
                continue
            stack.pop()
            if self.done[index]:
                continue
            self.done[index] = True
            self.order.append(index)
            if index in self.reductions:
                self.reduced.append(index)
            start = self.tasks[index].waits_for
            if start is not None and start in self.following and not self.done[self.following[start]]:
                stack.append(self.following.pop(start))

    def _missing(self, index: int) -> list[int]:
        """The tasks that have to run before a task; a reduction waits for the one before it."""
        missing = [before for before in _needs(self.tasks, index) if not self.done[before]]
        if index in self.reductions and self.reduced:
            waits = self.waits.get(self.reduced[-1], ())
            missing += [wait for wait in waits if not self.done[wait] and _ready(self.tasks[wait], self.done)]
        return missing


def _needs(tasks: Sequence[Task], index: int) -> list[int]:
    """The dependencies of a task. Starts depend on other starts only to keep the same order on all ranks, which does
    not matter here.
    """
    task = tasks[index]
    return [before for before in task.after if task.link is None or tasks[before].link is None]


def _ready(task: Task, done: Sequence[bool]) -> bool:
    return all(done[before] for before in task.after)
