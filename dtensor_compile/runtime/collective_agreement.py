"""Ranks exchange the collectives of a new graph before it runs; if two graphs cannot run together, each rank raises.

Input: the lowered graphs of one compilation. Output: none, or an `AgreementError` that names the first collective that
differs.

For every process group, ranks have to agree on the kinds of collectives over it in order, with dtypes and, if a
collective requires the same number of elements of every member, that number. Local shapes need not agree (uneven
shards), nor whole programs (stages of a pipeline, sub-meshes), nor messages between two ranks, which are left out.

The exchange cannot cause the hang that it is meant to prevent. It uses the store of the process group, not a
collective, and no rank waits for another longer than `PATIENCE`, or `MOST_PATIENT` times that while the other reports
that it compiles: a rank that does not compile at this point, because its own graph is still valid or because it runs
other code, announces nothing. A rank whose graph calls what it has announced before (a recompilation for another local
shape, for instance) neither announces nor waits. The cost is therefore at compile time only. Ranks also announce the
groups over which a graph communicates: if a redistribution would wait for a rank that has compiled the same function as
often, but never to a collective over that group, that is an error after `PATIENCE`; for other collectives it is a
warning.

A rank that does not answer within `PATIENCE` may be busy (loading data, for instance), or may call the same collectives
in eager. This rank then goes on silently and runs the graph; a thread (`runtime.look_out`) polls for the other rank's
announcement, and reports what is known if the graph

- is still waiting, or cannot be seen to wait (on a device with streams), `QUIET` seconds after the announcement;
- raises, as it does if another rank has died;
- cannot end, because the other rank has announced other collectives meanwhile, or cannot compile.

There are no heartbeats: a rank that dies closes the connections on which the others wait, and a live rank may still
never call the graph, so that heartbeats would cost a thread per rank of each job without deciding anything.

A backward pass may be compiled with its forward pass on one rank, and at its first run on another (with dynamic sizes,
if a shard of that rank is static): it is announced when it is compiled, and compared when it runs. A rank that cannot
compile announces that, and the ranks that wait for it raise.

    rank 0: graph 0 of step (train.py:12)  all_gather, all_reduce  -> store; reads rank 1's, raises
    rank 1: graph 0 of step (train.py:12)  all_gather              -> store; reads rank 0's, raises

A graph from Inductor's cache is announced like one that is compiled: the cache keeps it with its collectives.

Announcements correspond if they have the same function, the same group, and the same place in the order of that
function's distinct announcements over that group.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from dtensor_compile.compat.dynamo.tracing import of_compilation_on_stack, restarts_analysis
from dtensor_compile.errors import AgreementError
from dtensor_compile.runtime.announcement import Announcement, Call, graph_text, read_graph_text
from dtensor_compile.runtime.look_out import look_out
from dtensor_compile.runtime.waiting import (
    Answer,
    Waiting,
    announce_compiling,
    failure_key,
    function_name,
    groups_key,
    while_the_store_is_there,
)
from dtensor_compile.store.failed_ranks import add_note, announce_failure, first_line, mark_announced, name_failures
from dtensor_compile.store.ledger import Ledger, current_ledger

__all__ = ["Agreement", "Announcement", "Call"]

log = logging.getLogger("dtensor_compile")

#: Seconds that a rank waits for announcements of others. Ranks that run the same program announce theirs after
#: compiling, and would wait for each other in the first collective anyway.
PATIENCE = 10.0

#: Factor on `PATIENCE` while the awaited ranks report that they compile, which takes long on a busy machine.
MOST_PATIENT = 12.0

#: Seconds after which a rank that waits in a graph, for a rank that has not announced it, warns.
QUIET = 120.0


@dataclass
class Agreement:
    """The exchange for one compilation.

    Attributes:
        function: name of the compiled function, the same on every rank.
        graphs: number of graphs noted.
        noted: graphs that have not been announced yet, with whether they run at once.
        groups: for each of these graphs, by name, the groups over which it communicates.
        compiled: whether the forward is compiled, so that a graph that is noted now runs at once.
        time: number of compilations of the function on this rank, including this one.
        failures: number of failed compilations or comparisons of its backward pass; each run of it tries again.
        forward_graphs: number of graphs that were compiled at once.
        later: pending answers of other ranks for backward graphs that are compiled, and have not run.
        unanswered: for each graph that runs without answers of other ranks, the function to call when it has run, with
            the error if it raised.
        text: of the graph that was lowered last; caches keep it with the graph.
        explains: whether `has_run` is called with errors of the forward graph.
    """

    function: str
    graphs: int = 0
    noted: list[tuple[str, tuple[int, ...], Announcement, bool]] = field(default_factory=list)
    groups: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    compiled: bool = False
    time: int = 0
    failures: int = 0
    forward_graphs: int = 0
    later: list[Waiting] = field(default_factory=list)
    unanswered: list[Callable[[BaseException | None], None]] = field(default_factory=list)
    text: str = ""
    explains: bool = False

    @classmethod
    def of_frame(cls) -> Agreement:
        """The agreement for the frame that is being compiled on this thread."""
        code = of_compilation_on_stack("code")
        function = function_name(code) if code is not None else ""
        ledger = current_ledger()
        if ledger is None:
            return cls(function)
        time = ledger.compilations[function] = ledger.compilations.get(function, 0) + 1
        with while_the_store_is_there():
            announce_compiling(ledger, True, function)
        return cls(function, time=time)

    def note(self, graph: torch.fx.Graph) -> None:
        """Records a lowered graph; announces it at once if it is compiled at its first run, as some backward passes
        are.

        Raises:
            AgreementError: as `reach`.
        """
        if current_ledger() is not None:
            self.text = graph_text(graph)
            self.found(self.text)

    def found(self, text: str) -> None:
        """Records a graph by its text (`announcement.graph_text`): one that comes from a cache was lowered by an
        earlier process.

        Raises:
            AgreementError: as `reach`.
        """
        if not text or current_ledger() is None:
            return
        name = f"graph {self.graphs} of {self.function}"
        self.graphs += 1
        kind, announcements = read_graph_text(text)
        self.groups[name] = list(announcements)
        for ranks, mine in announcements.items():
            self.noted.append((name, ranks, mine, self.compiled or kind == "forward"))
        if self.compiled:
            self.reach()

    def begin_again(self) -> None:
        """Forgets graphs of a cache entry that is not used after all: the program is traced."""
        if not self.compiled:
            self.graphs = 0
            self.noted.clear()
            self.groups.clear()

    def reach(self) -> None:
        """Announces the recorded graphs, and compares them with announcements of other ranks.

        Raises:
            AgreementError: another rank's graph calls other collectives over the same group.
        """
        if not self.compiled:
            self.compiled, self.forward_graphs = True, self.graphs
        noted, self.noted = self.noted, []
        groups, self.groups = self.groups, {}
        ledger = current_ledger()
        if ledger is None:
            return
        with while_the_store_is_there():
            announce_compiling(ledger, False)
        if not self.graphs:  # from a cache that holds no collectives of them
            ledger.store.set(ledger.key((), self.function, dist.get_rank()), "1")
            return
        ledger.partners.setdefault(self.function, set()).update(*(ranks for _, ranks, *_ in noted))
        waiting: list[Waiting] = []
        began = time.monotonic()
        with while_the_store_is_there():
            for name, of_graph in groups.items():
                ledger.graphs[name] = ledger.graphs.get(name, 0) + 1
                ledger.store.set(groups_key(ledger, name, ledger.graphs[name], dist.get_rank()), json.dumps(of_graph))
            for name, ranks, mine, runs_now in noted:
                (waiting if runs_now else self.later).extend(self._announce(ledger, name, ranks, mine))
            self._go_on_without(_compare(ledger, waiting), began)

    def reach_backward(self) -> None:
        """Compares backward graphs that were compiled with their forward graph; called before they first run.

        Raises:
            AgreementError: as `reach`.
        """
        ledger = current_ledger()
        if ledger is None or not self.later:
            return
        later = [entry for entry in self.later if entry.ledger is ledger]
        try:
            with while_the_store_is_there():
                self._go_on_without(_compare(ledger, later), time.monotonic())
        except AgreementError:  # raised again if the program runs the backward pass again
            self.failures += 1
            self.later = [replace(entry, failed=self._failure_key(ledger, entry.rank)) for entry in later]
            raise
        self.later = []

    @contextlib.contextmanager
    def announcing_failures(self) -> Iterator[None]:
        """While active, an error that leaves the context is announced to the other ranks (`fail`)."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Announces that this rank cannot compile the function, or its backward pass; ranks that wait for it raise."""
        ledger = current_ledger()
        if ledger is None or restarts_analysis(error):
            return
        with while_the_store_is_there():
            announce_compiling(ledger, False)
            announce_failure(f"compile {self.function}", error)
            mark_announced(error)
            if not isinstance(error, AgreementError):  # which the other ranks know
                ledger.store.set(self._failure_key(ledger, dist.get_rank()), first_line(error))
        self.failures += 1
        self.graphs = min(self.graphs, self.forward_graphs)

    def has_run(self, error: BaseException | None = None) -> None:
        """Records that the graph compiled or compared last has run, or has raised: the error gets notes about ranks."""
        unanswered, self.unanswered = self.unanswered, []
        for on_run in unanswered:
            on_run(error)
        if error is not None and current_ledger() is not None:
            name_failures(error)

    def explained(self) -> None:
        """Records that `has_run` is called with errors of the forward graph, without a wrapper (`watch_runs`)."""
        self.explains = True

    def _go_on_without(self, waiting: list[Waiting], began: float) -> None:
        if waiting:
            self.unanswered.append(_look_out_for(waiting, began))

    def _announce(self, ledger: Ledger, name: str, ranks: tuple[int, ...], mine: Announcement) -> Iterator[Waiting]:
        place, counts = _place(ledger, name, ranks, mine)
        if place is None:
            return
        rank = dist.get_rank()
        text = json.dumps([mine.digest, [str(call) for call in mine.calls]])
        ledger.store.set(ledger.key(ranks, name, place, rank), text)
        for text in {mine.digest, f"{mine.kinds}:?"} if counts else ():
            times = ledger.announcements[ranks, text] = ledger.announcements.get((ranks, text), 0) + 1
            ledger.store.set(ledger.key(ranks, text, times, rank), "1")
        for other in ranks:
            if other != rank:
                enough = (
                    ledger.key(ranks, mine.digest, ledger.announcements[ranks, mine.digest], other),
                    ledger.key((), self.function, other),
                )
                same_place = ledger.key(ranks, name, place, other)
                yield Waiting(
                    ledger,
                    self.function,
                    name,
                    ranks,
                    mine,
                    other,
                    place,
                    same_place,
                    enough,
                    self._failure_key(ledger, other),
                )

    def _failure_key(self, ledger: Ledger, rank: int) -> str:
        return failure_key(ledger, self.function, self.time, self.failures, rank)


def _place(ledger: Ledger, name: str, ranks: tuple[int, ...], mine: Announcement) -> tuple[int | None, bool]:
    """The place of an announcement among those of its graph, and whether it counts as a new one of its kind; the place
    is None if there is an equal one that was not refused.
    """
    before: list[Announcement] = ledger.announced.setdefault((ranks, name), [])
    place = len(before)
    again = next((p for p in range(place) if (ranks, name, p) in ledger.unanswered), None)
    if again is not None:  # the others have announced nothing in this place: one of them failed
        ledger.unanswered.remove((ranks, name, again))
        counts = before[again].digest != mine.digest
        before[again] = mine
        return again, counts
    if any(mine.agrees(other.digest) and (ranks, name, p) not in ledger.refused for p, other in enumerate(before)):
        return None, False
    before.append(mine)
    return place, True


def _compare(ledger: Ledger, waiting: list[Waiting]) -> list[Waiting]:
    """Waits until all ranks have answered or need not be waited for; returns the entries of those that may still
    answer."""
    begin, pause = time.monotonic(), 0.002
    while True:
        still = []
        for entry in waiting:
            answer, sentence = entry.answer()
            if answer is Answer.DIFFERS:
                _refuse(ledger, entry)
                raise AgreementError(sentence)
            if answer is Answer.FAILED:
                ledger.unanswered.add((entry.ranks, entry.graph, entry.place))
                raise AgreementError(sentence)
            if answer is Answer.NONE:
                still.append(entry)
        waiting = still
        waited = time.monotonic() - begin
        if (
            not waiting
            or waited > PATIENCE
            and (waited > MOST_PATIENT * PATIENCE or not any(entry.compiles() for entry in waiting))
        ):
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    never = [entry for entry in waiting if entry.never_calls()]
    for entry in never:
        if entry.mine.redistributes:
            _refuse(ledger, entry)
            raise AgreementError(entry.missing())
        log.warning("%s", entry.late(waited))
    return [entry for entry in waiting if entry not in never]


def _look_out_for(waiting: list[Waiting], begin: float) -> Callable[[BaseException | None], None]:
    """Polls for answers from now on, and warns if the graph waits for a rank in vain.

    Returns:
        A function to call when the graph has run, with the error if it raised.
    """
    waiting, group, lock = list(waiting), dist.group.WORLD, threading.Lock()
    messages: list[str] = []

    def look(at_once: bool = False) -> bool:
        if dist.group.WORLD is not group:
            return True
        with lock:
            for entry in list(waiting):
                answer, sentence = entry.answer()
                if answer is Answer.NONE and not at_once and time.monotonic() - begin < QUIET:
                    continue
                waiting.remove(entry)
                if answer is not Answer.AGREES:
                    messages.append(sentence or entry.late(time.monotonic() - begin))
                    log.warning("%s", messages[-1])
            return not waiting

    end = look_out(look)

    def has_run(error: BaseException | None) -> None:
        if error is not None:
            end()
            with while_the_store_is_there():
                look(at_once=True)
            for message in messages:
                add_note(error, message)
        elif all(entry.mine.blocks for entry in waiting):
            end()

    return has_run


def _refuse(ledger: Ledger, entry: Waiting) -> None:
    """Records a refused announcement. If the program goes on after the error and compiles the same graph again, the
    graph is compared again, as on the other ranks.
    """
    ledger.refused.add((entry.ranks, entry.graph, entry.place))
