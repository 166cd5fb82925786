"""Ranks tell each other which collectives a new graph calls, before it runs; where two graphs cannot run together, each
rank raises.

In: the lowered graphs of one compilation. Out: nothing, or an `AgreementError` that names the first collective that
differs.

What has to agree is, for every process group, the kinds of collectives over it in their order, with dtypes and, where a
collective wants the same number of elements of everyone, that number. Local shapes need not agree (uneven shards), nor
whole programs (stages of a pipeline, sub-meshes), nor messages between two ranks, which are left out.

The exchange never becomes the hang that it is to prevent. It goes through the store of the process group, not through a
collective, and no rank waits for another longer than `PATIENCE`, or `MOST_PATIENT` times that while the other says that
it compiles: a rank that does not compile at this point, because its own graph still serves or because it runs other
code, has nothing to say. A rank whose graph calls what it has announced before, a recompilation for another local shape
for instance, says and waits for nothing. So the cost is at compile time, and there is none for a call. Ranks also say
over which groups a graph communicates: where a redistribution would wait for a rank that has compiled the same function
as often, and never to anything over that group, that is an error when `PATIENCE` is over, and of another collective
there is a warning.

A rank that does not come within `PATIENCE` may be busy, loading data for instance, or may call the same collectives in
eager. So this rank goes on, without a word, and runs the graph; a thread of it (`runtime.look_out`) looks for the
other's announcement, and says what it knows where the graph

- is still waiting, or cannot be seen to wait (on a device with streams), `QUIET` seconds after the announcement;
- raises, as it does where another rank has died;
- cannot end, for the other rank has announced other collectives meanwhile, or cannot compile.

No rank tells the others regularly that it lives: a rank that dies ends the connections on which the others wait, and
one that lives may still never call the graph, so that such a sign would cost each rank of each job a thread, and decide
nothing.

A backward pass may be compiled with its forward pass on one rank, and on another when it first runs (where sizes vary
and a shard of that rank does not): it is announced when it is compiled, and compared when it runs. A rank that cannot
compile says so, and those that wait for it raise.

    rank 0: graph 0 of step (train.py:12)  all_gather, all_reduce  -> store; reads rank 1's, raises
    rank 1: graph 0 of step (train.py:12)  all_gather              -> store; reads rank 0's, raises

Which announcements belong together: those of the same function, the same group, and the same place in the order in
which that function's announcements over that group differ.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.dynamo.tracing import of_compilation_on_stack, restarts_analysis
from dtensor_compile.errors import AgreementError
from dtensor_compile.recording.recorder import graph_name
from dtensor_compile.runtime.announcement import Announcement, Call, collectives_by_group
from dtensor_compile.runtime.look_out import look_out
from dtensor_compile.runtime.waiting import Answer, Waiting, groups_key, say_compiling
from dtensor_compile.store.ledger import Book, current_book

__all__ = ["Agreement", "Announcement", "Call"]

log = logging.getLogger("dtensor_compile")

#: Seconds that a rank waits for the others' announcements. Ranks that run the same program announce theirs when they
#: have compiled, and would wait for each other in the first collective anyway.
PATIENCE = 10.0

#: How many times `PATIENCE` a rank waits for others that compile, as a busy machine makes them take long.
MOST_PATIENT = 12.0

#: Seconds after which a rank that waits in a graph, for one that has said nothing of it, says so.
QUIET = 120.0


@dataclass
class Agreement:
    """The exchange for one compilation.

    Attributes:
        function: what is compiled, named alike on every rank.
        graphs: number of graphs noted.
        noted: those that have not been announced yet, with whether they run at once.
        groups: of each of these graphs the groups over which it communicates, by its name.
        compiled: whether the forward is compiled, so that a graph that is noted now runs at once.
        time: which compilation of the function on this rank it is.
        failures: how often its backward pass could not be compiled or compared; each run of it tries again.
        forward_graphs: number of graphs that were compiled at once.
        later: what others have to say to backward graphs that are compiled, and have not run.
        unanswered: for each graph that runs without the others' answers, what to call when it has run, with the error
            if it raised.
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

    @classmethod
    def of_frame(cls) -> Agreement:
        """For the frame that is being compiled on this thread."""
        code = of_compilation_on_stack("code")
        function = (
            f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})" if code is not None else ""
        )
        book = current_book()
        if book is None:
            return cls(function)
        time = book.compilations[function] = book.compilations.get(function, 0) + 1
        with _while_the_store_is_there():
            say_compiling(book, True, function)
        return cls(function, time=time)

    def note(self, graph: torch.fx.Graph) -> None:
        """Takes in a lowered graph; one that is compiled when it first runs, as some backward passes are, is announced
        at once.

        Raises:
            AgreementError: as `reach`.
        """
        book = current_book()
        if book is None:
            return
        name = f"graph {self.graphs} of {self.function}"
        self.graphs += 1
        symbolic = any(isinstance(n.meta.get("val"), torch.SymInt) for n in graph.find_nodes(op="placeholder"))
        by_group = collectives_by_group(graph)
        self.groups[name] = list(by_group)
        for ranks, calls in by_group.items():
            self.noted.append(
                (name, ranks, Announcement.of(calls, symbolic), self.compiled or graph_name(graph) == "forward")
            )
        if self.compiled:
            self.reach()

    def reach(self) -> None:
        """Announces what was noted, and compares it with what the others announce.

        Raises:
            AgreementError: another rank's graph calls other collectives over the same group.
        """
        if not self.compiled:
            self.compiled, self.forward_graphs = True, self.graphs
        noted, self.noted = self.noted, []
        groups, self.groups = self.groups, {}
        book = current_book()
        if book is None:
            return
        with _while_the_store_is_there():
            say_compiling(book, False)
        if not self.graphs:  # from a cache, which keeps what an earlier compilation agreed on
            book.store.set(book.key((), self.function, dist.get_rank()), "1")
            return
        waiting: list[Waiting] = []
        with _while_the_store_is_there():
            for name, ranks in groups.items():
                book.graphs[name] = book.graphs.get(name, 0) + 1
                book.store.set(groups_key(book, name, book.graphs[name], dist.get_rank()), json.dumps(ranks))
            for name, ranks, mine, runs_now in noted:
                (waiting if runs_now else self.later).extend(self._announce(book, name, ranks, mine))
            self._go_on_without(_compare(book, waiting))

    def reach_backward(self) -> None:
        """Compares backward graphs that were compiled with their forward graph; called before they first run.

        Raises:
            AgreementError: as `reach`.
        """
        book = current_book()
        if book is None or not self.later:
            return
        later = [entry for entry in self.later if entry.book is book]
        try:
            with _while_the_store_is_there():
                self._go_on_without(_compare(book, later))
        except AgreementError:  # what the program does when it runs the backward pass again
            self.failures += 1
            self.later = [replace(entry, failed=self._failure_key(book, entry.rank)) for entry in later]
            raise
        self.later = []

    @contextlib.contextmanager
    def failures_told(self) -> Iterator[None]:
        """While it is entered, an error that leaves it is told to the others (`fail`)."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Says that this rank cannot compile the function, or its backward pass; whoever waits for it raises."""
        book = current_book()
        if book is None or restarts_analysis(error):
            return
        with _while_the_store_is_there():
            say_compiling(book, False)
            if not isinstance(error, AgreementError):  # of which the others know
                reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
                book.store.set(self._failure_key(book, dist.get_rank()), reason)
        self.failures += 1
        self.graphs = min(self.graphs, self.forward_graphs)

    def watched(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, of which the first call is known to have run (`has_run`); itself where all ranks have
        answered.
        """
        if not self.unanswered:
            return compiled

        def run(*args: Any) -> Any:
            if not self.unanswered:
                return compiled(*args)
            try:
                results = compiled(*args)
            except Exception as error:
                self.has_run(error)
                raise
            self.has_run()
            return results

        return run

    def has_run(self, error: BaseException | None = None) -> None:
        """Takes note that the graph that was compiled or compared last has run, or has raised."""
        unanswered, self.unanswered = self.unanswered, []
        for tell in unanswered:
            tell(error)

    def _go_on_without(self, waiting: list[Waiting]) -> None:
        if waiting:
            self.unanswered.append(_look_out_for(waiting, time.monotonic()))

    def _announce(self, book: Book, name: str, ranks: tuple[int, ...], mine: Announcement) -> Iterator[Waiting]:
        place, counts = _place(book, name, ranks, mine)
        if place is None:
            return
        rank = dist.get_rank()
        text = json.dumps([mine.digest, [str(call) for call in mine.calls]])
        book.store.set(book.key(ranks, name, place, rank), text)
        for text in {mine.digest, f"{mine.kinds}:?"} if counts else ():
            times = book.said[ranks, text] = book.said.get((ranks, text), 0) + 1
            book.store.set(book.key(ranks, text, times, rank), "1")
        for other in ranks:
            if other != rank:
                enough = (
                    book.key(ranks, mine.digest, book.said[ranks, mine.digest], other),
                    book.key((), self.function, other),
                )
                same_place = book.key(ranks, name, place, other)
                yield Waiting(
                    book,
                    self.function,
                    name,
                    ranks,
                    mine,
                    other,
                    place,
                    same_place,
                    enough,
                    self._failure_key(book, other),
                )

    def _failure_key(self, book: Book, rank: int) -> str:
        return book.key((), f"failure of {self.function}", self.time, self.failures, rank)


def _place(book: Book, name: str, ranks: tuple[int, ...], mine: Announcement) -> tuple[int | None, bool]:
    """The place that an announcement takes among those of its graph, and whether it counts as one more of its kind;
    None where one that was not refused says the same.
    """
    before: list[Announcement] = book.announced.setdefault((ranks, name), [])
    place = len(before)
    again = next((p for p in range(place) if (ranks, name, p) in book.unanswered), None)
    if again is not None:  # the others have announced nothing in this place: one of them failed
        book.unanswered.remove((ranks, name, again))
        counts = before[again].digest != mine.digest
        before[again] = mine
        return again, counts
    if any(mine.agrees(other.digest) and (ranks, name, p) not in book.refused for p, other in enumerate(before)):
        return None, False
    before.append(mine)
    return place, True


@contextlib.contextmanager
def _while_the_store_is_there() -> Iterator[None]:
    try:
        yield
    except AgreementError:
        raise
    except RuntimeError as error:
        log.warning("ranks could not compare their graphs: %s", error)  # the store is gone, and with it the job


def _compare(book: Book, waiting: list[Waiting]) -> list[Waiting]:
    """Waits until all have answered, or are not worth waiting for; gives those that have not, and may still come."""
    begin, pause = time.monotonic(), 0.002
    while True:
        still = []
        for entry in waiting:
            answer, sentence = entry.answer()
            if answer is Answer.DIFFERS:
                _refuse(book, entry)
                raise AgreementError(sentence)
            if answer is Answer.FAILED:
                book.unanswered.add((entry.ranks, entry.graph, entry.place))
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
            _refuse(book, entry)
            raise AgreementError(entry.missing())
        log.warning("%s", entry.late(waited))
    return [entry for entry in waiting if entry not in never]


def _look_out_for(waiting: list[Waiting], begin: float) -> Callable[[BaseException | None], None]:
    """Looks for answers from now on, and says what it finds where the graph waits for a rank in vain.

    Returns:
        What to call when the graph has run, with the error if it raised.
    """
    waiting, group, lock = list(waiting), dist.group.WORLD, threading.Lock()

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
                    log.warning("%s", sentence or entry.late(time.monotonic() - begin))
            return not waiting

    end = look_out(look)

    def has_run(error: BaseException | None) -> None:
        if error is not None:
            end()
            with _while_the_store_is_there():
                look(at_once=True)
        elif all(entry.mine.blocks for entry in waiting):
            end()

    return has_run


def _refuse(book: Book, entry: Waiting) -> None:
    """Where the program goes on after the error, the same graph, compiled again, is compared again, as it is on the
    other ranks.
    """
    book.refused.add((entry.ranks, entry.graph, entry.place))
