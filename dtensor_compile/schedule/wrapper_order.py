"""The order in which ``fully_shard`` itself would run the tasks of a graph: what it takes, and above all what it holds.

In: tasks in an order in which they may run, and which starts gather and reduce for a wrapper. Out: another such order.

    given     gather a; wait a; mm a; gather b; wait b; mm b; reduce b; wait; reduce a; wait
    wrapper   gather a; wait a; gather b; mm a; wait b; mm b; reduce b; ...; wait; reduce a; wait

In eager each wrapped module gathers its parameters while the one before it computes, forward and backward, and a
reduction is waited for when the next one starts (`torch.distributed.fsdp`, prefetching). At one time two modules have
whole parameters, and one reduction holds its input. Somebody who wraps a model has chosen this much memory: it is the
peak that a bound on memory is relative to, where the compiler's own order, which waits for all at once, has a lower
one.

This order is measured, never run: it may start collectives in another order than other ranks do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dtensor_compile.schedule.list_scheduler import Simulation, Task, simulate


def wrapper_peak(tasks: Sequence[Task], wrapped: Mapping[int, bool]) -> int:
    """Bytes that the wrapper's own order holds at most; 0 where there is no wrapper.

    Args:
        wrapped: starts of collectives of a wrapper, and whether they reduce.
    """
    return simulate_wrapper(tasks, wrapped).peak if wrapped else 0


def simulate_wrapper(tasks: Sequence[Task], wrapped: Mapping[int, bool]) -> Simulation:
    """What happens in the wrapper's own order; `wrapped` is as for `wrapper_peak`."""
    gathers = {index for index, reduces in wrapped.items() if not reduces}
    return simulate(tasks, wrapper_order(tasks, gathers, wrapped.keys() - gathers))


def wrapper_order(tasks: Sequence[Task], gathers: Collection[int], reductions: Collection[int]) -> list[int]:
    """The order of a wrapper.

    Args:
        tasks: in an order in which they may run.
        gathers, reductions: starts of collectives of the wrapper; other starts are waited for at once.
    """
    waits: dict[int, list[int]] = {}
    first_use: dict[int, int] = {}
    for index, task in enumerate(tasks):
        if task.waits_for is not None:
            waits.setdefault(task.waits_for, []).append(index)
        for before in task.after:
            start = tasks[before].waits_for
            if start is not None and start in gathers and task.waits_for is None:
                first_use.setdefault(start, index)
    in_turn = sorted(first_use, key=first_use.__getitem__)
    following = dict(zip(in_turn, in_turn[1:]))
    done = [False] * len(tasks)
    order: list[int] = []
    reduced: list[int] = []

    def run(wanted: int) -> None:
        stack = [wanted]
        while stack:
            index = stack[-1]
            missing = [] if done[index] else [before for before in _needs(tasks, index) if not done[before]]
            if index in reductions and reduced and not done[index]:
                missing += [wait for wait in waits.get(reduced[-1], ()) if not done[wait] and _ready(tasks[wait], done)]
            if missing:
                stack += missing
                continue
            stack.pop()
            if done[index]:
                continue
            done[index] = True
            order.append(index)
            if index in reductions:
                reduced.append(index)
            start = tasks[index].waits_for
            if start is not None and start in following and not done[following[start]]:
                stack.append(following.pop(start))

    for index, task in enumerate(tasks):
        if task.waits_for is None and index not in gathers:
            run(index)
            if task.link is not None and index not in reductions:
                for wait in waits.get(index, ()):
                    run(wait)
    for index in range(len(tasks)):
        run(index)
    return order


def _needs(tasks: Sequence[Task], index: int) -> list[int]:
    """What a task needs. Starts are tied to others only to keep the order of the ranks, which is no matter here."""
    task = tasks[index]
    return [before for before in task.after if task.link is None or tasks[before].link is None]


def _ready(task: Task, done: Sequence[bool]) -> bool:
    return all(done[before] for before in task.after)
