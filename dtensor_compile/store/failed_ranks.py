"""Failures to compile, announced to all ranks of the job, so that errors of ranks that lose a peer name the reason.

A rank that runs a graph it compiled long ago does not poll: it waits in a collective for a rank that fails to compile,
and gets ``Connection closed by peer`` when the process of that rank ends. The reason is in the store by then.
"""

from __future__ import annotations

import json
import time

import torch.distributed as dist

from dtensor_compile.store.ledger import Ledger, current_ledger

#: Number of failures that an error names, the last ones first.
MOST_NAMED = 3
#: Attribute of errors that have been announced.
_ANNOUNCED = "_dtensor_compile_announced"


def announce_failure(what: str, error: BaseException) -> None:
    """Announces to all ranks that this one could not do something (``"compile f"``)."""
    ledger = current_ledger()
    if ledger is None:
        return
    number = ledger.store.add(_count_key(ledger), 1)
    ledger.store.set(_key(ledger, number), json.dumps([dist.get_rank(), what, first_line(error), time.time()]))


def failures_of_others() -> list[str]:
    """A sentence for each of the last failures that other ranks announced, the last one first."""
    ledger = current_ledger()
    if ledger is None or not ledger.store.check([_count_key(ledger)]):
        return []
    sentences: list[str] = []
    for number in range(ledger.store.add(_count_key(ledger), 0), 0, -1):
        if len(sentences) == MOST_NAMED:
            break
        if ledger.store.check([_key(ledger, number)]):
            rank, what, message, then = json.loads(ledger.store.get(_key(ledger, number)))
            if rank != dist.get_rank():
                seconds = max(0.0, time.time() - then)
                sentences.append(f"rank {rank} could not {what} {seconds:.0f} s ago: {message}")
    return sentences


def name_failures(error: BaseException) -> None:
    """Adds the failures of other ranks to an error, as notes, which are printed with it."""
    try:
        sentences = failures_of_others()
    except RuntimeError:
        sentences = ["the store of the job, which rank 0 holds in most jobs, is gone: its process has ended"]
    for sentence in sentences:
        add_note(error, sentence)


def first_line(error: BaseException) -> str:
    """Class and first line of an error, or of the one that Dynamo raises it for."""
    error = getattr(error, "inner_exception", error)
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def mark_announced(error: BaseException) -> None:
    """Notes that other ranks know of an error."""
    error.__dict__[_ANNOUNCED] = True


def is_announced(error: BaseException) -> bool:
    """Whether other ranks know of an error, or of one that it comes from."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        if _ANNOUNCED in now.__dict__:
            return True
        seen.add(id(now))
        now = getattr(now, "inner_exception", None) or now.__cause__ or now.__context__
    return False


def add_note(error: BaseException, sentence: str) -> None:
    """Adds a note about other ranks to an error, once."""
    note = f"dtensor_compile: {sentence}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _count_key(ledger: Ledger) -> str:
    return ledger.key((), "failures")


def _key(ledger: Ledger, number: int) -> str:
    return ledger.key((), "failures", number)
