"""Ranks that cannot compile tell it to all ranks of the job, so that errors of those that lose them can say why.

A rank that runs a graph it compiled long ago is not looking: it waits in a collective for a rank that fails to compile,
and gets ``Connection closed by peer`` when the process of that rank ends. The reason is in the store by then.
"""

from __future__ import annotations

import json
import time

import torch.distributed as dist

from dtensor_compile.store.ledger import Book, current_book

#: Number of failures that an error names, the last ones first.
MOST_NAMED = 3
#: Attribute of errors that have been told.
_TOLD = "_dtensor_compile_told"


def tell_failure(what: str, error: BaseException) -> None:
    """Tells all ranks that this one could not do something (``"compile f"``)."""
    book = current_book()
    if book is None:
        return
    number = book.store.add(_count_key(book), 1)
    book.store.set(_key(book, number), json.dumps([dist.get_rank(), what, first_line(error), time.time()]))


def failures_of_others() -> list[str]:
    """A sentence for each of the last failures that another rank has told, the last one first."""
    book = current_book()
    if book is None or not book.store.check([_count_key(book)]):
        return []
    sentences: list[str] = []
    for number in range(book.store.add(_count_key(book), 0), 0, -1):
        if len(sentences) == MOST_NAMED:
            break
        if book.store.check([_key(book, number)]):
            rank, what, said, then = json.loads(book.store.get(_key(book, number)))
            if rank != dist.get_rank():
                seconds = max(0.0, time.time() - then)
                sentences.append(f"rank {rank} could not {what} {seconds:.0f} s ago: {said}")
    return sentences


def name_failures(error: BaseException) -> None:
    """Adds what other ranks have told to an error, as notes; whoever prints the error prints them."""
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


def mark_told(error: BaseException) -> None:
    """Notes that other ranks know of an error."""
    error.__dict__[_TOLD] = True


def is_told(error: BaseException) -> bool:
    """Whether other ranks know of an error, or of one that it comes from."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        if _TOLD in now.__dict__:
            return True
        seen.add(id(now))
        now = getattr(now, "inner_exception", None) or now.__cause__ or now.__context__
    return False


def add_note(error: BaseException, sentence: str) -> None:
    """Adds a note about other ranks to an error, once."""
    note = f"dtensor_compile: {sentence}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _count_key(book: Book) -> str:
    return book.key((), "failures")


def _key(book: Book, number: int) -> str:
    return book.key((), "failures", number)
