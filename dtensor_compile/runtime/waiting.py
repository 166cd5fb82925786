"""Answers of other ranks that a rank waits for before and while it runs a graph, and messages about them."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from dtensor_compile.errors import AgreementError
from dtensor_compile.runtime.announcement import Announcement
from dtensor_compile.store.ledger import Ledger

log = logging.getLogger("dtensor_compile")

_COMPILING = "1"


def announce_compiling(ledger: Ledger, compiles: bool, function: str = "") -> None:
    """Announces that this rank compiles `function`, or that it is ready."""
    ledger.store.set(_compiling_key(ledger, dist.get_rank()), _COMPILING if compiles else "")
    if compiles:
        ledger.store.set(_begun_key(ledger, function, dist.get_rank()), str(ledger.compilations.get(function, 0)))


class Answer(enum.Enum):
    """Answer of another rank: none yet, nothing to compare, other collectives, or that it cannot compile."""

    NONE, AGREES, DIFFERS, FAILED = range(4)


@dataclass
class Waiting:
    """The pending answer of one other rank to one announcement.

    Attributes:
        function, graph: names of the compiled function and of its graph, the same on every rank.
        place: of the announcement among those of the graph over these ranks.
        same_place: key of the other rank's announcement in that place.
        enough: keys, each of which means that there is nothing to compare: the other rank has announced the same
            collectives as often, for any functions, or takes this graph from a cache.
        failed: key under which the other rank announces that it cannot compile the same function.
    """

    ledger: Ledger
    function: str
    graph: str
    ranks: tuple[int, ...]
    mine: Announcement
    rank: int
    place: int
    same_place: str
    enough: tuple[str, ...]
    failed: str

    def answer(self) -> tuple[Answer, str]:
        """The answer of the other rank so far, and the message if the two graphs cannot run together."""
        store = self.ledger.store
        if store.check(
            [self.failed]
        ):  # first: it may have tried again since, and announced that, before this rank has looked
            return Answer.FAILED, self._failure(store.get(self.failed).decode())
        if store.check([self.same_place]):
            digest, calls = json.loads(store.get(self.same_place))
            return (
                (Answer.AGREES, "") if self.mine.agrees(digest) else (Answer.DIFFERS, self._difference(digest, calls))
            )
        return (Answer.AGREES if any(store.check([key]) for key in self.enough) else Answer.NONE), ""

    def compiles(self) -> bool:
        """Whether the other rank has announced that it compiles, and not that it is ready: it may still answer."""
        return is_compiling(self.ledger, self.rank)

    def begun(self) -> bool:
        """Whether the other rank has begun to compile the function as often as this one."""
        key = _begun_key(self.ledger, self.function, self.rank)
        times = int(self.ledger.store.get(key)) if self.ledger.store.check([key]) else 0
        return times >= self.ledger.compilations.get(self.function, 0)

    def never_calls(self) -> bool:
        """Whether the other rank has compiled the same graph as often as this one, and never with a collective over the
        group.
        """
        count, store = 0, self.ledger.store
        while store.check([key := groups_key(self.ledger, self.graph, count + 1, self.rank)]):
            count += 1
            if list(self.ranks) in json.loads(store.get(key)):
                return False
        return count >= self.ledger.graphs.get(self.graph, 0) > 0

    def late(self, seconds: float) -> str:
        """Message that the other rank has not answered within `seconds`, and its state as far as known."""
        does = (
            "still compiles"
            if self.compiles()
            else "does not compile now"
            if self.begun()
            else f"has not begun to compile {self.function}"
        )
        return (
            f"{self.graph} calls collectives ({', '.join(map(str, self.mine.calls[:3]))}), and rank {self.rank} has "
            f"said nothing of them within {seconds:.0f} s: it {does}. This is no error if it comes later, or calls "
            "them from other code; if the job hangs, look here for collectives that not all ranks call."
        )

    def missing(self) -> str:
        """Message that the other rank never redistributes over the group (`never_calls`)."""
        return (
            f"ranks {dist.get_rank()} and {self.rank} compiled {self.graph} to different collectives, and rank "
            f"{dist.get_rank()} would hang: it has {self.mine.calls[0]} over ranks "
            f"{', '.join(map(str, self.ranks))}, and rank {self.rank} has none over these. Every rank of a mesh has to "
            "redistribute in the same way: look for a branch on the rank or on a value that differs between ranks; "
            "with dynamic sizes (dynamic=True), ranks may have made different ones static; dynamic=False compiles for "
            "each size."
        )

    def _failure(self, reason: str) -> str:
        return (
            f"rank {self.rank} could not compile what rank {dist.get_rank()} compiled as {self.graph}, and rank "
            f"{dist.get_rank()} would hang in {self.mine.calls[0]}. Rank {self.rank} said: {reason}"
        )

    def _difference(self, digest: str, theirs: list[str]) -> str:
        mine = [str(call) for call in self.mine.calls]
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
        here, there = (calls[at] if at < len(calls) else "no further collective" for calls in (mine, theirs))
        return (
            f"ranks {dist.get_rank()} and {self.rank} compiled {self.graph} to different collectives over the same "
            f"process group, and would wait for each other forever. Collective {at + 1} of {len(mine)}: rank "
            f"{dist.get_rank()} has {here}; rank {self.rank} (of {len(theirs)}) has {there}. Digests "
            f"{self.mine.digest} and {digest}. Every rank of a group has to call the same collectives in the same "
            "order: look for a branch on the rank or on a value that differs between ranks."
        )


def is_compiling(ledger: Ledger, rank: int) -> bool:
    """Whether a rank has announced that it compiles, and not that it is ready."""
    key = _compiling_key(ledger, rank)
    return bool(ledger.store.check([key])) and ledger.store.get(key) == _COMPILING.encode()


def has_begun(ledger: Ledger, function: str, rank: int) -> bool:
    """Whether a rank has ever begun to compile a function."""
    return bool(ledger.store.check([_begun_key(ledger, function, rank)]))


def function_name(code: types.CodeType) -> str:
    """Name of a compiled function, the same on every rank."""
    return f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


@contextlib.contextmanager
def while_the_store_is_there() -> Iterator[None]:
    try:
        yield
    except AgreementError:
        raise
    except RuntimeError as error:
        log.warning("ranks could not compare their graphs: %s", error)  # the store is gone, and so is the job


def failure_key(ledger: Ledger, function: str, time: int, failures: int, rank: int) -> str:
    """Key under which a rank announces that it cannot compile a function that it compiles for the `time`-th time, or
    its backward pass; `failures` counts those announced before in the same compilation."""
    return ledger.key((), f"failure of {function}", time, failures, rank)


def groups_key(ledger: Ledger, graph: str, count: int, rank: int) -> str:
    """Key of the groups over which a rank's graph communicates, when it was compiled for the `count`-th time."""
    return ledger.key((), f"groups of {graph}", count, rank)


def _compiling_key(ledger: Ledger, rank: int) -> str:
    return ledger.key((), "compiling", rank)


def _begun_key(ledger: Ledger, function: str, rank: int) -> str:
    return ledger.key((), f"begun {function}", rank)
