"""Tasks, and their simulation in an order: one stream computes, and each link carries one collective after the other,
as ``report/schedule.py`` shows it.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that a task fills.

    Attributes:
        bytes: bytes that are live from when the task runs until its last reader has run.
        freed: bytes that are freed then; fewer if another buffer shares the memory.
        kept: whether it is never freed (outputs).
    """

    bytes: int
    freed: int
    kept: bool = False


@dataclass(frozen=True)
class Task:
    """One kernel, one start or one wait.

    Attributes:
        seconds: seconds on its stream; for a start those of the collective on its link, for a wait 0.
        after: tasks that it depends on.
        link: of a start, the link that carries it; None for others.
        waits_for: of a wait, its start; None for others.
        makes: memory that it fills.
        reads: memory that it needs; a wait needs what its start reads.
        given: whether it is an input, which takes no time and has run before all others.
        host: for a start, seconds before it during which nothing is computed.
        inside: bytes that it holds while it runs besides its inputs and results, as a call of a block does.
        behind: for a start, seconds by which the collective ends after the one before it on its link, if that one was
            under way when it started; None for `seconds`.
    """

    seconds: float = 0.0
    after: tuple[int, ...] = ()
    link: str | None = None
    waits_for: int | None = None
    makes: tuple[Buffer, ...] = ()
    reads: tuple[Buffer, ...] = ()
    given: bool = False
    host: float = 0.0
    inside: int = 0
    behind: float | None = None

    @property
    def on_link(self) -> float:
        """For a start, seconds in which its link carries no other collective."""
        return self.seconds if self.behind is None else self.behind

    @property
    def bytes(self) -> int:
        """Bytes of the memory that it fills."""
        return sum(buffer.bytes for buffer in self.makes)

    @property
    def needs(self) -> int:
        """Bytes beside those that are live before it."""
        return self.bytes + self.inside

    @property
    def grows(self) -> bool:
        """Whether a start makes more than it reads, as gathers do."""
        return not self.reads or self.bytes > sum(buffer.bytes for buffer in self.reads)

    @property
    def shrinks(self) -> bool:
        """Whether a start makes less than it reads, as reductions to shards do: the wait for it frees memory."""
        return self.bytes < sum(buffer.bytes for buffer in self.reads)


@dataclass
class Simulation:
    """The result of simulating an order of tasks.

    Attributes:
        seconds: total time.
        peak: maximum bytes live at one time.
        exposed: by start, seconds for which compute waits for it.
    """

    seconds: float = 0.0
    peak: int = 0
    exposed: dict[int, float] = field(default_factory=dict)


class SimulatedDevice:
    """The state of the simulated device: time, links and live bytes."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.now = 0.0
        self.free: dict[str, float] = {}
        self.ends: dict[int, float] = {}
        self.carried: dict[str, list[float]] = {}  # when those of a link end, in their order
        self.busy: dict[str, float] = {}  # since when a link carries one after the other
        self.exposed: dict[int, float] = {}
        self.readers = Counter(buffer for task in tasks for buffer in task.reads)
        self.live = self.peak = 0

    def run(self, index: int) -> None:
        task = self.tasks[index]
        self.now += task.host
        if task.link is not None:
            free = max(self.now, self.free.get(task.link, 0.0))
            if free == self.now:
                self.busy[task.link] = self.now
            self.ends[index] = self.free[task.link] = max(self.now + task.seconds, free + task.on_link)
            self.carried.setdefault(task.link, []).append(self.ends[index])
            self.exposed[index] = 0.0
        elif task.waits_for is not None:
            waited = max(0.0, self.ends[task.waits_for] - self.now)
            self.exposed[task.waits_for] += waited
            self.now = max(self.now, self.ends[task.waits_for])  # a sum could fall short of it by a rounding
        else:
            self.now += task.seconds
        self.peak = max(self.peak, self.live + task.needs)
        self.live += task.bytes
        for buffer in task.reads:
            self.readers[buffer] -= 1
            self._give_back(buffer)
        for buffer in task.makes:
            self._give_back(buffer)

    def _give_back(self, buffer: Buffer) -> None:
        if not self.readers[buffer] and not buffer.kept:
            self.live -= buffer.freed

    def backlog(self, link: str) -> float:
        return max(0.0, self.free.get(link, 0.0) - self.now)

    def in_flight(self, link: str) -> int:
        """Number of collectives that have been started on a link and have not ended."""
        ends = self.carried.get(link, [])
        return len(ends) - bisect.bisect_right(ends, self.now)

    def result(self) -> Simulation:
        return Simulation(max([self.now, *self.free.values()]), self.peak, self.exposed)


def simulate(tasks: Sequence[Task], order: Sequence[int]) -> Simulation:
    """Simulates `tasks` in `order`."""
    return replay(tasks, order, math.inf)[0]


def replay(tasks: Sequence[Task], order: Sequence[int], bound: float) -> tuple[Simulation, dict[int, float]]:
    """Simulates `order`; also returns, for each stretch over the bound, the task at its peak and the bytes over the
    bound.
    """
    device, missing, at = SimulatedDevice(tasks), dict[int, float](), None
    for index in order:
        over = device.live + tasks[index].needs - bound
        device.run(index)
        if over <= 0:
            at = None
        elif at is None or over > missing[at]:
            if at is not None:
                del missing[at]
            at, missing[index] = index, over
    return device.result(), missing


def precede_starts(tasks: Sequence[Task]) -> list[bool]:
    """For each task whether a start depends on it."""
    found = [False] * len(tasks)
    for index in range(len(tasks) - 1, -1, -1):
        if found[index] or tasks[index].link is not None:
            for before in tasks[index].after:
                found[before] = True
    return found


def still_needed(tasks: Sequence[Task], index: int, done: Sequence[bool]) -> set[int]:
    """The tasks that are not done and have to run before one."""
    found, stack = set[int](), [index]
    while stack:
        new = {before for before in tasks[stack.pop()].after if not done[before]} - found
        found |= new
        stack += new
    return found
