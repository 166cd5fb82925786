"""Lower bound on the seconds of any order of tasks, to which schedules are compared.

In: tasks of `dtensor_compile.schedule.list_scheduler`. Out: seconds.

Communication overlaps with compute only as far as dependencies allow: the first gather overlaps with nothing, and a
gradient cannot be sent before it is computed. So max(compute, communication) is often out of reach; this bound is
tighter.

A start has a head, the earliest time at which its input can be ready, and a tail, which has to run after it has ended.
The head is the longer of two: its longest chain of tasks and collectives, and all compute that it needs, because one
stream computes. Likewise for the tail. A link carries one collective after the other, so that for any set of them the
smallest head, all their seconds on the link (`Task.on_link`), what the first takes beyond these and the smallest tail
add up. The largest such sum is over sets of the form {head >= h,
tail >= t} (Jackson's rule for one machine; Carlier, European Journal of Operational Research 11, 1982). For the stream,
sets of compute with heads of at least h are taken in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np

from dtensor_compile.schedule.simulated_device import Task


def least_seconds(tasks: Sequence[Task]) -> float:
    """Lower bound on the seconds of any order of `tasks`, with unlimited memory.

    Args:
        tasks: in an order in which they may run.
    """
    starts = [index for index, task in enumerate(tasks) if task.link is not None]
    before = [task.after for task in tasks]
    after: list[list[int]] = [[] for _ in tasks]  # what has to run after a task has ended
    for index, others in enumerate(before):
        for other in others:
            if not _only_ordered(tasks, other, index):
                after[other].append(index)
    forward, backward = range(len(tasks)), range(len(tasks) - 1, -1, -1)
    heads = _paths(
        forward, before, lambda other, index: 0.0 if _only_ordered(tasks, other, index) else tasks[other].seconds
    )
    tails = _paths(backward, after, lambda other, index: tasks[other].seconds)
    streamed = [0.0 if task.link is not None else task.seconds for task in tasks]
    for index, seconds in _sums(streamed, forward, before, starts):
        heads[index] = max(heads[index], seconds)
    for index, seconds in _sums(streamed, backward, after, starts):
        tails[index] = max(tails[index], seconds)
    found = [
        _one_machine(
            [
                (heads[i], this.on_link, this.seconds - this.on_link, tails[i])
                for i in starts
                if (this := tasks[i]).link == link
            ]
        )
        for link in _links(tasks)
    ]
    found.append(_stream([(heads[i], seconds, tails[i]) for i, seconds in enumerate(streamed) if seconds]))
    return max(found)


def _only_ordered(tasks: Sequence[Task], other: int, index: int) -> bool:
    """Whether `index` comes after the start `other` and does not wait for it."""
    return tasks[other].link is not None and tasks[index].waits_for != other


def _links(tasks: Iterable[Task]) -> set[str]:
    return {task.link for task in tasks if task.link is not None}


def _paths(order: Iterable[int], near: Sequence[Sequence[int]], between: Callable[[int, int], float]) -> list[float]:
    """Seconds of the longest chain to each task along `near`, with the seconds of `between` for each step."""
    longest = [0.0] * len(near)
    for index in order:
        longest[index] = max((longest[other] + between(other, index) for other in near[index]), default=0.0)
    return longest


def _sums(
    seconds: Sequence[float], order: Iterable[int], near: Sequence[Sequence[int]], wanted: Sequence[int]
) -> Iterable[tuple[int, float]]:
    """For each of `wanted`, the seconds of all tasks that it reaches along `near`."""
    reached = [0] * len(seconds)  # sets as bits
    for index in order:
        for other in near[index]:
            reached[index] |= reached[other] | 1 << other
    values, size = np.asarray(seconds), (len(seconds) + 7) // 8
    for index in wanted:
        bits = np.unpackbits(np.frombuffer(reached[index].to_bytes(size, "little"), np.uint8), bitorder="little")
        yield index, float(values @ bits[: len(seconds)])


def _one_machine(jobs: list[tuple[float, float, float, float]]) -> float:
    """The largest sum over sets of jobs: of the smallest head, all seconds on the machine, the least that one takes
    beyond these, and the smallest tail.
    """
    by_tail = sorted(jobs, key=lambda job: -job[3])
    least = 0.0
    for head in {job[0] for job in jobs}:
        seconds, beyond = 0.0, math.inf
        for job in by_tail:
            if job[0] >= head:
                seconds, beyond = seconds + job[1], min(beyond, job[2])
                least = max(least, head + seconds + beyond + job[3])
    return least


def _stream(jobs: list[tuple[float, float, float]]) -> float:
    """The same over sets of all jobs with heads of at least that of one of them."""
    jobs = sorted(jobs, reverse=True)
    seconds = accumulate(job[1] for job in jobs)
    tails = accumulate((job[2] for job in jobs), min)
    return max((job[0] + total + tail for job, total, tail in zip(jobs, seconds, tails)), default=0.0)
