"""Orders tasks so that collectives overlap with compute: list scheduling on a simulated device.

In: tasks in topological order, with seconds, bytes and dependencies. Out: another topological order.

    before   start a; wait a; mm(a); start b; wait b; mm(b)
    after    start a; start b; wait a; mm(a); wait b; mm(b)

Correct because it keeps every dependency and the order of starts. That order is the same on all ranks, so there is no
deadlock: each rank of the first incomplete collective has started it, or waits before that for an earlier one, which is
complete. Tasks between two starts may differ between ranks.

At each moment of the simulation (``simulated_device.py``)

1. the next collective starts if its input is there, a place in flight is free and the memory bound allows it. A place
   is free while the link has less to do than the longest kernel takes: more in flight would only hold memory. The
   second place is always free: a link with a single collective is idle from its end until this host has started
   another, which is not simulated. A collective that makes no more than it reads (a reduction) needs no place: it holds
   as much before it starts, and compute may take longer than estimated.
2. else the compute that it needs runs, as far as it is not held up,
3. else other compute that nothing holds up, in the order given; in a second attempt not compute that takes more than
   twice as long as the collective that holds up what the next one needs, such as a whole block of a model while the
   sum of a norm's gradient is on its way, without which the gradients of the block before cannot be sent,
4. else the wait that ends first. A wait runs just before the first task that needs it, one that ends a reduction of a
   gradient when that is surely done, because its input is held until then: what is left to do with the gradient, such
   as unpacking a bucket, may come much later.

Over the memory bound it continues in the given order, because a postponed task may need more memory later. If that
breaks the bound, it tries again: tasks that allocated too early for the peak are ordered after it, tasks that freed too
late before it, and then with a lower bound. The result is the fastest order that keeps the bound, or the given order if
none is faster in the simulation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace

from dtensor_compile.schedule.least_time import least_seconds
from dtensor_compile.schedule.simulated_device import (
    Buffer,
    SimulatedDevice,
    Task,
    precede_starts,
    replay,
    simulate,
    still_needed,
)

#: The reduction of a gradient counts as done after its simulated end plus this fraction of the time for which its link
#: was busy until then: errors of estimates add up as long as it is.
SLACK = 0.25

#: Number of collectives that may always be in flight on a link.
PLACES = 2

#: Fractions of the memory bound that are tried, and for each the number of attempts with ties added at peaks.
TRIES, ROUNDS = (1.0, 0.97, 0.94, 0.9, 0.85, 0.75, 0.6), 8
#: Relative tolerance below which two times count as equal.
TIME_TOLERANCE = 1e-3


def arrange(tasks: Sequence[Task], bound: float) -> list[int]:
    """The order in which to run `tasks`, which are given in topological order.

    Args:
        bound: maximum bytes live at one time.

    Starts keep their order. Returns the given order if no faster one that keeps the bound is found.
    """
    given = list(range(len(tasks)))
    if not any(task.link is not None for task in tasks):
        return given
    best, seconds = given, simulate(tasks, given).seconds
    for patient in (False, True):
        best, seconds, again = _arranged(tasks, bound, patient, best, seconds)
        if not again or seconds <= least_seconds(tasks) * (1.0 + TIME_TOLERANCE):
            break
    return best


def _arranged(
    tasks: Sequence[Task], bound: float, patient: bool, best: list[int], seconds: float
) -> tuple[list[int], float, bool]:
    """The faster of `best`, which takes `seconds`, and an order that keeps `bound`, and its seconds; whether a patient
    attempt may find another one."""
    longest = max((task.seconds for task in tasks if task.link is None), default=0.0)
    least = math.inf  # seconds of the best order without the bound
    again = False
    for tried in TRIES:
        tied = list(tasks)
        for _ in range(ROUNDS):
            if seconds <= least * (1.0 + TIME_TOLERANCE) < math.inf:
                return best, seconds, again
            attempt = _Arrangement(tied, tried * bound, longest, patient)
            order = attempt.run()
            again = again or attempt.hurried
            found, missing = replay(tasks, order, bound)
            least = min(least, found.seconds)
            if not missing:
                if found.seconds < seconds * (1.0 - TIME_TOLERANCE):
                    best, seconds = order, found.seconds
                break
            ties = [tie for index, size in missing.items() for tie in _ties(tasks, order, index, size)]
            if not ties:
                break
            for before, after in ties:
                tied[after] = replace(tied[after], after=tuple(dict.fromkeys((*tied[after].after, before))))
    return best, seconds, again


def _ties(tasks: Sequence[Task], order: Sequence[int], peak: int, over: float) -> list[tuple[int, int]]:
    """Pairs of tasks, the first of which has to run before the second, so that an order holds less at a peak.

    A buffer that is live at the peak, but not when that task runs in the given order, was made too early, or a reader
    runs too late. Pairs follow the given order, so that all of them can be kept. Those that save most come first, until
    they save enough.

    Args:
        peak: the task that runs at the peak.
        over: bytes over the bound there.
    """
    saved = _saved(tasks, set(order[: order.index(peak) + 1]), peak)
    ties = []
    for tie, size in sorted(saved.items(), key=lambda item: (-item[1], item[0])):
        if over <= 0:
            break
        if size:
            ties.append(tie)
            over -= size
    return ties


def _saved(tasks: Sequence[Task], ran: set[int], peak: int) -> dict[tuple[int, int], int]:
    """The pairs that `_ties` chooses from, and the bytes that each saves at the peak; `ran` are the tasks up to it."""
    readers: dict[Buffer, list[int]] = {}
    for index, task in enumerate(tasks):
        for buffer in task.reads:
            readers.setdefault(buffer, []).append(index)
    saved: dict[tuple[int, int], int] = {}
    for maker in sorted(ran - {peak}):
        if tasks[maker].given:
            continue
        for buffer in tasks[maker].makes:
            late = [reader for reader in readers.get(buffer, ()) if reader not in ran]
            if buffer.kept or not late and readers.get(buffer):
                continue
            behind = [(peak, maker)] if maker > peak else [(reader, peak) for reader in late if max(late) < peak]
            for tie in behind:
                saved[tie] = saved.get(tie, 0) + buffer.freed
    return saved


class _Candidates:
    """The tasks that have run, and those that could.

    Waits are not candidates: a task whose other dependencies are met is one, and the waits that it needs run with it.
    """

    def __init__(self, tasks: Sequence[Task], bound: float) -> None:
        self.tasks, self.bound = tasks, bound
        self.device = SimulatedDevice(tasks)
        self.order: list[int] = []
        self.done = [False] * len(tasks)
        self.users: list[list[int]] = [[] for _ in tasks]
        self.missing = [len(set(task.after)) for task in tasks]
        self.waits: list[list[int]] = [[] for _ in tasks]  # that are ready, by the task that needs them
        for index, task in enumerate(tasks):
            for before in dict.fromkeys(task.after):
                self.users[before].append(index)
        self.starts = [index for index, task in enumerate(tasks) if task.link is not None]
        self.place = 0  # in `starts`
        self.wanted = -1  # the start whose ancestors are marked
        self.marks = [-1] * len(tasks)
        self.free: list[int] = []  # candidates that nothing holds up, lowest first
        self.toward: list[int] = []  # those of them that the next start needs
        self.held: list[tuple[float, int]] = []  # candidates that a collective holds up, by when it ends
        self.ending: list[tuple[float, int]] = []  # waits for reductions that no other collective needs
        self.sends_later = precede_starts(tasks)
        self.stray: list[int] = []  # waits that only other waits need
        self.first = 0  # of the tasks that have not run

    def _ready(self, index: int) -> None:
        task = self.tasks[index]
        if task.waits_for is None:
            if self._is_part_of_start(task):
                self._execute(index)
            else:
                self._candidate(index)
            return
        users = [user for user in self.users[index] if self.tasks[user].waits_for is None]
        start = self.tasks[task.waits_for]
        if not self.users[index] or start.shrinks and not self.sends_later[index]:
            end = self.device.ends[task.waits_for]
            end += SLACK * (end - self.device.busy[start.link or ""])
            heapq.heappush(self.ending, (end, index))
        if len(users) < len(self.users[index]):
            self.stray.append(index)
        for user in users:
            self.waits[user].append(index)
            self.missing[user] -= 1
            if not self.missing[user]:
                self._candidate(user)

    def _is_part_of_start(self, task: Task) -> bool:
        """Whether a task takes one of several results of a collective, for which another one waits."""
        return not task.seconds and task.link is None and any(self.tasks[b].link is not None for b in task.after)

    def _candidate(self, index: int) -> None:
        if self.tasks[index].link is not None:
            return  # starts run in their order
        until = self._held_until(index)
        if until > self.device.now:
            heapq.heappush(self.held, (until, index))
        else:
            self._put(index)

    def _put(self, index: int) -> None:
        heapq.heappush(self.free, index)
        if self.marks[index] == self.wanted:
            heapq.heappush(self.toward, index)

    def _held_until(self, index: int) -> float:
        starts = [self.tasks[wait].waits_for for wait in self.waits[index] if not self.done[wait]]
        return max((self.device.ends[start] for start in starts if start is not None), default=0.0)

    def _fits(self, index: int) -> bool:
        return self.device.live + self.tasks[index].needs <= self.bound

    def _turn(self) -> int:
        """The first task of the given order that has not run, except waits."""
        while self.first < len(self.tasks) and (self.done[self.first] or self.tasks[self.first].waits_for is not None):
            self.first += 1
        return self.first

    def _mark(self) -> None:
        """Marks the ancestors of the next start."""
        start = self.starts[self.place] if self.place < len(self.starts) else -1
        if start == self.wanted:
            return
        self.wanted = start
        for before in still_needed(self.tasks, start, self.done) if start >= 0 else ():
            self.marks[before] = start
        self.toward = [index for index in self.free if not self.done[index] and self.marks[index] == start]
        heapq.heapify(self.toward)

    def _execute(self, index: int) -> None:
        for wait in self.tasks[index].after:
            if not self.done[wait]:
                self._execute(wait)
        self.done[index] = True
        self.order.append(index)
        self.device.run(index)
        is_wait = self.tasks[index].waits_for is not None
        for user in self.users[index]:
            if is_wait and self.tasks[user].waits_for is None:
                continue  # it was counted when the wait became ready
            self.missing[user] -= 1
            if not self.missing[user] and not self.done[user]:
                self._ready(user)


class _Arrangement(_Candidates):
    """One pass over the tasks, which chooses among the candidates."""

    def __init__(self, tasks: Sequence[Task], bound: float, longest: float, patient: bool) -> None:
        super().__init__(tasks, bound)
        self.places, self.patient = longest, patient
        self.hurried = False  # whether compute ran where a patient attempt waits

    def run(self) -> list[int]:
        for index in [i for i, task in enumerate(self.tasks) if task.given]:
            self._execute(index)
        for index, task in enumerate(self.tasks):
            if not task.after and not task.given:
                self._ready(index)
        while len(self.order) < len(self.tasks):
            if not self._release() and not self._start() and not self._compute():
                self._stall()
        return self.order

    def _release(self) -> bool:
        """Releases tasks whose collectives have ended; returns whether a wait has run."""
        while self.held and self.held[0][0] <= self.device.now:
            index = heapq.heappop(self.held)[1]
            if not self.done[index]:
                self._put(index)
        return self._end(self.device.now)

    def _end(self, until: float = math.inf) -> bool:
        """Runs the wait for the reduction that is done first, if it is by then; returns whether there was one."""
        if not self._is_ending() or self.ending[0][0] > until:
            return False
        self._execute(heapq.heappop(self.ending)[1])
        return True

    def _is_ending(self) -> bool:
        """Whether there is a reduction that nothing has waited for."""
        while self.ending and self.done[self.ending[0][1]]:
            heapq.heappop(self.ending)
        return bool(self.ending)

    def _start(self) -> bool:
        """Runs the next start, if it may run now."""
        if self.place == len(self.starts):
            return False
        index = self.starts[self.place]
        if self.missing[index] or self._held_until(index) > self.device.now:
            return False
        if index != self._turn():
            link = self.tasks[index].link or ""
            backlog = self.device.backlog(link)
            full = 0 < backlog >= self.places and self.device.in_flight(link) >= PLACES
            if not self._fits(index) or full and self.tasks[index].grows:
                return False
        self._execute(index)
        self.place += 1
        return True

    def _compute(self) -> bool:
        """Runs one task that is not held up, if memory allows it or nothing else can run."""
        self._mark()
        best, start = self._fitting(self.toward), self.tasks[self.wanted]
        if best is None or start.grows and self.device.backlog(start.link or "") > self.places:
            best = self._fitting(self.free)
        if best is not None and self.marks[best] != self.wanted and self._is_late_after(best):
            if self.patient:
                return False
            self.hurried = True
        if best is not None:
            self._execute(best)
            return True
        if not self.free or self.held or self._is_ending():
            return False
        self._go_on()
        return True

    def _is_late_after(self, index: int) -> bool:
        """Whether the next start would be later by more than what holds it up, if a task ran before."""
        if self.wanted >= 0 and not self.missing[self.wanted]:
            until = self._held_until(self.wanted)
        else:
            held = (end for end, held in self.held if self.marks[held] == self.wanted and not self.done[held])
            until = min(held, default=math.inf)
        return 2 * (until - self.device.now) < self.tasks[index].seconds

    def _fitting(self, heap: list[int]) -> int | None:
        """The first task of a heap that memory allows."""
        too_large, found = [], None
        while heap and found is None:
            index = heap[0]
            if self.done[index] or not self._fits(index):
                heapq.heappop(heap)
                too_large += [] if self.done[index] else [index]
            else:
                found = index
        for index in too_large:
            heapq.heappush(heap, index)
        return found

    def _stall(self) -> None:
        """Waits, because nothing else can run."""
        start = self.starts[self.place] if self.place < len(self.starts) else None
        if start is not None and self.missing[start]:
            start = None  # not ready
        until = 0.0 if start is None else self._held_until(start)
        while self.held and self.done[self.held[0][1]]:
            heapq.heappop(self.held)
        if self.held and not (until > self.device.now and until <= self.held[0][0]):
            if self._fits(self.held[0][1]):
                index = heapq.heappop(self.held)[1]
                for wait in self.waits[index]:  # the link is free by then: another start comes before the compute
                    if not self.done[wait]:
                        self._execute(wait)
                self._put(index)
            else:
                self._go_on()
        elif until > self.device.now or not self._end():
            if start is not None:
                self.place += 1
                self._execute(start)
            else:
                self._execute(next(index for index in self.stray if not self.done[index]))

    def _go_on(self) -> None:
        """Memory is short: frees the input of a reduction, or runs the next task of the given order."""
        if self._end():
            return
        index = self._turn()
        self.place += self.tasks[index].link is not None
        self._execute(index)


def excess(fraction: float, peak: int) -> float:
    """The bound in bytes for an allowed excess over the `peak` of the given order."""
    return math.inf if math.isinf(fraction) else peak * (1.0 + fraction)
