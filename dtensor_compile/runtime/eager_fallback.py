"""Ranks fall back to eager together, or raise: when they reach Dynamo's recompile limit, and when they cannot compile
and the program suppresses errors of the compiler.

Eager calls other collectives than a graph whose redistributions are planned and bucketed: a rank that runs a frame in
eager while the others run it compiled would hang, or exchange the wrong tensors.

Input: the code of a frame that this rank does not compile. Output: none if all ranks with which its graphs communicate
do not compile it either (they tell so through the store); then none of them uses a compiled graph of that frame again.
Otherwise an `AgreementError`; the other ranks get its reason with the error about the lost connection.
"""

from __future__ import annotations

import time
import types

import torch.distributed as dist

from dtensor_compile.compat.dynamo.recompile_limits import reaches_recompile_limit, run_in_eager
from dtensor_compile.errors import AgreementError
from dtensor_compile.runtime.collective_agreement import MOST_PATIENT
from dtensor_compile.runtime.waiting import function_name, has_begun, is_compiling, while_the_store_is_there
from dtensor_compile.store.failed_ranks import first_line, tell_failure
from dtensor_compile.store.ledger import Book, current_book

#: Seconds that a rank waits for the others. In eager it would wait for them in the next collective anyway.
PATIENCE = 20.0


def fall_back_together(code: types.CodeType, error: Exception) -> None:
    """Called with an error for which Dynamo runs `code` in eager.

    Raises:
        AgreementError: other ranks, with which its graphs communicate, run a compiled graph.
    """
    book, function = current_book(), function_name(code)
    if book is None or reaches_recompile_limit(error) and not book.partners.get(function):
        return  # what it has compiled calls no collectives, and goes on to run where its guards hold
    with while_the_store_is_there():
        missing = _missing(book, function)
        if missing:
            told = AgreementError(_message(function, missing, error))
            tell_failure(f"compile {function}", told)
            raise told from error
    run_in_eager(error)


def _missing(book: Book, function: str) -> list[int]:
    """Ranks that have compiled the function and do not run it in eager, after waiting for them."""
    me = dist.get_rank()
    times = book.in_eager[function] = book.in_eager.get(function, 0) + 1
    book.store.set(_key(book, function, times, me), "1")
    partners = book.partners.get(function, set()) - {me}
    waiting = sorted(rank for rank in partners if has_begun(book, function, rank))
    begin = time.monotonic()
    while True:
        waiting = [rank for rank in waiting if not book.store.check([_key(book, function, times, rank)])]
        waited = time.monotonic() - begin
        if not waiting or (
            waited > PATIENCE
            and (waited > MOST_PATIENT * PATIENCE or not any(is_compiling(book, rank) for rank in waiting))
        ):
            return waiting
        time.sleep(0.02)


def _key(book: Book, function: str, times: int, rank: int) -> str:
    return book.key((), f"{function} in eager", times, rank)


def _message(function: str, missing: list[int], error: Exception) -> str:
    others = f"rank{'s' if missing[1:] else ''} {', '.join(map(str, missing))}"
    if reaches_recompile_limit(error):
        cause = f"has compiled {function} as often as Dynamo's recompile limit allows"
        cure = (
            "Look for a value or a local size that changes from call to call on this rank only (TORCH_LOGS=recompiles "
            "names it); dynamic=True for a size, or a higher torch._dynamo.config.recompile_limit, may help."
        )
    else:
        cause = f"cannot compile {function} ({first_line(error)})"
        cure = "torch._dynamo.config.suppress_errors cannot help where only some ranks fail: mend what this rank lacks."
    return (
        f"rank {dist.get_rank()} {cause} and would run it in eager from now on, but {others} would run a compiled "
        f"graph, which calls other collectives: ranks would hang, or get wrong numbers. {cure}"
    )
