"""Ranks tell each other which collectives a new graph calls, before it runs; where two graphs cannot run together, each rank
raises.

In: the lowered graphs of one compilation. Out: nothing, or an `AgreementError` that names the first collective that differs.

What has to agree is, for every process group, the kinds of collectives over it in their order, with dtypes and, where a
collective wants the same number of elements of everyone, that number. Local shapes need not agree (uneven shards), nor whole
programs (stages of a pipeline, sub-meshes), nor messages between two ranks, which are left out.

The exchange never becomes the hang that it is to prevent. It goes through the store of the process group, not through a
collective, and no rank waits for another longer than `PATIENCE`, or `MOST_PATIENT` times that while the other says that it compiles: a
rank that does not compile at this point, because its own graph still serves or because it runs other code, has nothing to say. A rank whose graph calls what it has announced before, a
recompilation for another local shape for instance, says and waits for nothing. So the cost is at compile time, and there is
none for a call. Ranks also say over which groups a graph communicates: where a redistribution would wait for a rank that has compiled
the same function as often, and never to anything over that group, that is an error when `PATIENCE` is over.

A backward pass may be compiled with its forward pass on one rank, and on another when it first runs (where sizes vary and a shard of
that rank does not): it is announced when it is compiled, and compared when it runs. A rank that cannot compile says so, and those
that wait for it raise.

    rank 0: graph 0 of step (train.py:12)  all_gather, all_reduce  -> store; reads rank 1's, raises
    rank 1: graph 0 of step (train.py:12)  all_gather              -> store; reads rank 0's, raises

Which announcements belong together: those of the same function, the same group, and the same place in the order in which that
function's announcements over that group differ.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from dtensor_compile.compat.dynamo.tracing import of_compilation_on_stack, restarts_analysis
from dtensor_compile.errors import AgreementError
from dtensor_compile.graph.nodes import ACROSS, REDISTRIBUTES, source_line, starts_collective
from dtensor_compile.graph.node_costs import group_of
from dtensor_compile.recording.recorder import graph_name
from dtensor_compile.store.ledger import Book, current_book, digest

log = logging.getLogger("dtensor_compile")

#: Seconds that a rank waits for the others' announcements. Ranks that run the same program announce theirs when they have
#: compiled, and would wait for each other in the first collective anyway.
PATIENCE = 10.0

#: How many times `PATIENCE` a rank waits for others that compile, as a busy machine makes them take long.
MOST_PATIENT = 12.0
_COMPILING = b"1"

#: Collectives whose members all bring as many elements.
_EQUAL_SIZES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
_NO_COLLECTIVE = ("wait_tensor", "c10d_exchange", "c10d_isend", "c10d_irecv")


@dataclass(frozen=True)
class Call:
    """A collective of a graph.

    Attributes:
        kind: operator, reduction, dtype, and between which meshes it is part of a redistribution: ``all_reduce sum float32``.
        elements: that each member brings; None where they may differ or are not known before the graph runs.
        where: the user's line.
        redistributes: whether it is part of a redistribution.
    """

    kind: str
    elements: int | None
    where: str
    redistributes: bool = False

    def __str__(self) -> str:
        size = "" if self.elements is None else f" of {self.elements} elements"
        return f"{self.kind}{size}" + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Announcement:
    """The collectives of one graph over one group: digests to compare, and the calls for the message.

    Attributes:
        kinds: digest of the kinds in order.
        sizes: digest of the sizes; ``"?"`` where one of them is symbolic, which agrees with any.
    """

    kinds: str
    sizes: str
    calls: tuple[Call, ...]

    @classmethod
    def of(cls, calls: Sequence[Call], symbolic: bool) -> Announcement:
        kinds = digest([c.kind for c in calls])
        return cls(kinds, "?" if symbolic else digest([c.elements for c in calls]), tuple(calls))

    @property
    def digest(self) -> str:
        return f"{self.kinds}:{self.sizes}"

    @property
    def redistributes(self) -> bool:
        """Whether all calls are parts of redistributions, which all ranks of a group run alike."""
        return all(call.redistributes for call in self.calls)

    def agrees(self, digest: str) -> bool:
        kinds, _, sizes = digest.partition(":")
        return kinds == self.kinds and (sizes == self.sizes or "?" in (sizes, self.sizes))


def collectives_by_group(graph: torch.fx.Graph) -> dict[tuple[int, ...], list[Call]]:
    """The collectives of a lowered graph in their order, by the ranks that take part."""
    calls: dict[tuple[int, ...], list[Call]] = {}
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        namespace, name = node.target._schema.name.split("::")
        ours = namespace == "dtensor_compile" and name.startswith("c10d_")
        if name in _NO_COLLECTIVE or not (starts_collective(node) or ours):
            continue
        group = group_of(node)
        if group is not None and group.size() > 1:
            calls.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), []).append(_call(node, name))
    return calls


def _call(node: torch.fx.Node, name: str) -> Call:
    value = next((v for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), torch.Tensor)), None)
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    arguments = [value for value, argument in zip(node.args, schema) if argument.name in ("reduce_op", "op")]
    dtype = [] if value is None else [str(value.dtype).removeprefix("torch.")]
    name = name.removeprefix("c10d_")
    elements = value.numel() if value is not None and name.rstrip("_") in _EQUAL_SIZES else None
    known = elements if isinstance(elements, int) else None
    across = [node.meta[ACROSS]] if ACROSS in node.meta else []
    return Call(" ".join([name, *map(str, arguments), *dtype, *across]), known, source_line(node), REDISTRIBUTES in node.meta)


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
    """

    function: str
    graphs: int = 0
    noted: list[tuple[str, tuple[int, ...], Announcement, bool]] = field(default_factory=list)
    groups: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    compiled: bool = False
    time: int = 0
    failures: int = 0
    forward_graphs: int = 0
    later: list[_Waiting] = field(default_factory=list)

    @classmethod
    def of_frame(cls) -> Agreement:
        """For the frame that is being compiled on this thread."""
        code = of_compilation_on_stack("code")
        function = f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})" if code is not None else ""
        book = current_book()
        if book is None:
            return cls(function)
        time = book.compilations[function] = book.compilations.get(function, 0) + 1
        _say_compiling(book, True)
        return cls(function, time=time)

    def note(self, graph: torch.fx.Graph) -> None:
        """Takes in a lowered graph; one that is compiled when it first runs, as some backward passes are, is announced at once.

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
            self.noted.append((name, ranks, Announcement.of(calls, symbolic), self.compiled or graph_name(graph) == "forward"))
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
        _say_compiling(book, False)
        if not self.graphs:  # from a cache, which keeps what an earlier compilation agreed on
            book.store.set(book.key((), self.function, dist.get_rank()), "1")
            return
        waiting: list[_Waiting] = []
        with _while_the_store_is_there():
            for name, ranks in groups.items():
                book.graphs[name] = book.graphs.get(name, 0) + 1
                book.store.set(_groups_key(book, name, book.graphs[name], dist.get_rank()), json.dumps(ranks))
            for name, ranks, mine, runs_now in noted:
                (waiting if runs_now else self.later).extend(self._announce(book, name, ranks, mine))
            _compare(book, waiting)

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
                _compare(book, later)
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
        _say_compiling(book, False)
        if not isinstance(error, AgreementError):  # of which the others know
            with _while_the_store_is_there():
                reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
                book.store.set(self._failure_key(book, dist.get_rank()), reason)
        self.failures += 1
        self.graphs = min(self.graphs, self.forward_graphs)

    def _announce(self, book: Book, name: str, ranks: tuple[int, ...], mine: Announcement) -> Iterator[_Waiting]:
        before: list[Announcement] = book.announced.setdefault((ranks, name), [])
        place, rank = len(before), dist.get_rank()
        again = next((p for p in range(place) if (ranks, name, p) in book.unanswered), None)
        if again is not None:  # the others have announced nothing in this place: one of them failed
            book.unanswered.remove((ranks, name, again))
            place, counts = again, before[again].digest != mine.digest
            before[place] = mine
        elif any(mine.agrees(other.digest) and (ranks, name, p) not in book.refused for p, other in enumerate(before)):
            return
        else:
            counts = True
            before.append(mine)
        text = json.dumps([mine.digest, [str(call) for call in mine.calls]])
        book.store.set(book.key(ranks, name, place, rank), text)
        for text in {mine.digest, f"{mine.kinds}:?"} if counts else ():
            times = book.said[ranks, text] = book.said.get((ranks, text), 0) + 1
            book.store.set(book.key(ranks, text, times, rank), "1")
        for other in ranks:
            if other != rank:
                enough = (book.key(ranks, mine.digest, book.said[ranks, mine.digest], other), book.key((), self.function, other))
                same_place = book.key(ranks, name, place, other)
                yield _Waiting(book, name, ranks, mine, other, place, same_place, enough, self._failure_key(book, other))

    def _failure_key(self, book: Book, rank: int) -> str:
        return book.key((), f"failure of {self.function}", self.time, self.failures, rank)


@contextlib.contextmanager
def _while_the_store_is_there() -> Iterator[None]:
    try:
        yield
    except AgreementError:
        raise
    except RuntimeError as error:
        log.warning("ranks could not compare their graphs: %s", error)  # the store is gone, and with it the job


@dataclass
class _Waiting:
    """What one other rank has to say to one announcement.

    Attributes:
        place: of the announcement among those of the graph over these ranks.
        same_place: key of the other rank's announcement in that place.
        enough: keys of which each says that there is nothing to compare: it has announced the same as often, for whatever
            functions, or takes this one from a cache.
        failed: key under which it says that it cannot compile the same function.
    """

    book: Book
    name: str
    ranks: tuple[int, ...]
    mine: Announcement
    rank: int
    place: int
    same_place: str
    enough: tuple[str, ...]
    failed: str


def _compiling_key(book: Book, rank: int) -> str:
    return book.key((), "compiling", rank)


def _say_compiling(book: Book, compiles: bool) -> None:
    with _while_the_store_is_there():
        book.store.set(_compiling_key(book, dist.get_rank()), _COMPILING if compiles else b"")


def _compiles(book: Book, rank: int) -> bool:
    """Whether a rank has said that it compiles, and not that it is ready: it is slow, and may still come."""
    key = _compiling_key(book, rank)
    return bool(book.store.check([key])) and book.store.get(key) == _COMPILING


def _compare(book: Book, waiting: list[_Waiting]) -> None:
    begin, pause = time.monotonic(), 0.002
    while True:
        still = []
        for entry in waiting:
            if book.store.check([entry.same_place]):
                digest, calls = json.loads(book.store.get(entry.same_place))
                if not entry.mine.agrees(digest):
                    _refuse(book, entry)
                    raise AgreementError(_difference(entry, digest, calls))
            elif book.store.check([entry.failed]):
                book.unanswered.add((entry.ranks, entry.name, entry.place))
                raise AgreementError(_failure(entry, book.store.get(entry.failed).decode()))
            elif not any(book.store.check([key]) for key in entry.enough):
                still.append(entry)
        waiting = still
        if not waiting:
            return
        waited = time.monotonic() - begin
        if waited > PATIENCE and (waited > MOST_PATIENT * PATIENCE or not any(_compiles(book, entry.rank) for entry in waiting)):
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    for entry in waiting:
        if entry.mine.redistributes and _never_calls(book, entry):
            _refuse(book, entry)
            raise AgreementError(_missing(entry))
        log.warning(
            "%s calls collectives (%s), and rank %d has said nothing of them within %.0f s: %s. Nothing is wrong where it comes later, "
            "or calls them from other code; if the job hangs, look here for collectives that not all ranks call.",
            entry.name, ", ".join(map(str, entry.mine.calls[:3])), entry.rank, waited,
            "it still compiles" if _compiles(book, entry.rank) else "it does not compile now",
        )  # fmt: skip


def _refuse(book: Book, entry: _Waiting) -> None:
    """Where the program goes on after the error, the same graph, compiled again, is compared again, as it is on the other ranks."""
    book.refused.add((entry.ranks, entry.name, entry.place))


def _groups_key(book: Book, name: str, count: int, rank: int) -> str:
    return book.key((), f"groups of {name}", count, rank)


def _never_calls(book: Book, entry: _Waiting) -> bool:
    """Whether the other rank has compiled the same graph as often as this one, and never with a collective over the group."""
    count = 0
    while book.store.check([_groups_key(book, entry.name, count + 1, entry.rank)]):
        count += 1
        if list(entry.ranks) in json.loads(book.store.get(_groups_key(book, entry.name, count, entry.rank))):
            return False
    return count >= book.graphs.get(entry.name, 0) > 0


def _missing(entry: _Waiting) -> str:
    return (
        f"ranks {dist.get_rank()} and {entry.rank} compiled {entry.name} to different collectives, and rank {dist.get_rank()} would "
        f"wait for ever: it has {entry.mine.calls[0]} over ranks {', '.join(map(str, entry.ranks))}, and rank {entry.rank} has none "
        "over these. Every rank of a mesh has to redistribute in the same way: look for a branch on the rank or on a value that "
        "differs between ranks; where sizes vary (dynamic=True), ranks may have fixed other ones, and dynamic=False compiles for each."
    )


def _failure(entry: _Waiting, reason: str) -> str:
    return (
        f"rank {entry.rank} could not compile what rank {dist.get_rank()} compiled as {entry.name}, and rank {dist.get_rank()} would "
        f"wait for it for ever in {entry.mine.calls[0]}. Rank {entry.rank} said: {reason}"
    )


def _difference(entry: _Waiting, digest: str, theirs: list[str]) -> str:
    mine = [str(call) for call in entry.mine.calls]
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
    here, there = (calls[at] if at < len(calls) else "no further collective" for calls in (mine, theirs))
    return (
        f"ranks {dist.get_rank()} and {entry.rank} compiled {entry.name} to different collectives over the same process group, "
        f"and would wait for each other for ever. Collective {at + 1} of {len(mine)}: rank {dist.get_rank()} has {here}; rank "
        f"{entry.rank} (of {len(theirs)}) has {there}. Digests {entry.mine.digest} and {digest}. Every rank of a group has to "
        "call the same collectives in the same order: look for a branch on the rank or on a value that differs between ranks."
    )
