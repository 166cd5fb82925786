"""Ranks fall back to eager together, or raise: when they reach Dynamo's recompile limit, and when they cannot compile
and the program suppresses errors of the compiler.

Eager calls other collectives than a graph whose redistributions are planned and bucketed: a rank that runs a frame in
eager while the others run it compiled would hang, or exchange the wrong tensors.

Input: the code of a frame that this rank does not compile. Output: none if all ranks with which its graphs communicate
do not compile it either (they announce that through the store); then none of them uses a compiled graph of that frame
again. Otherwise an `AgreementError`; the other ranks get its reason with the error about the lost connection.
"""

from __future__ import annotations

import time
import types

import torch.distributed as dist

from dtensor_compile.compat.dynamo.recompile_limits import reaches_recompile_limit, run_in_eager
from dtensor_compile.errors import AgreementError
from dtensor_compile.runtime.collective_agreement import MOST_PATIENT
from dtensor_compile.runtime.waiting import function_name, has_begun, is_compiling, while_the_store_is_there
from dtensor_compile.store.failed_ranks import announce_failure, first_line
from dtensor_compile.store.ledger import Ledger, current_ledger

#: Seconds that a rank waits for the others. In eager it would wait for them in the next collective anyway.
PATIENCE = 20.0


def fall_back_together(code: types.CodeType, error: Exception) -> None:
    """Called with an error for which Dynamo runs `code` in eager.

    Raises:
        AgreementError: other ranks, with which its graphs communicate, run a compiled graph.
    """
    ledger, function = current_ledger(), function_name(code)
    if ledger is None or reaches_recompile_limit(error) and not ledger.partners.get(function):
        return  # its compiled code calls no collectives, and still runs where its guards hold
    with while_the_store_is_there():
        missing = _missing(ledger, function)
        if missing:
            refusal = AgreementError(_message(function, missing, error))
            announce_failure(f"compile {function}", refusal)
            raise refusal from error
    run_in_eager(error)


def _missing(ledger: Ledger, function: str) -> list[int]:
    """Ranks that have compiled the function and do not run it in eager, after waiting for them."""
    me = dist.get_rank()
    times = ledger.in_eager[function] = ledger.in_eager.get(function, 0) + 1
    ledger.store.set(_key(ledger, function, times, me), "1")
    partners = ledger.partners.get(function, set()) - {me}
    waiting = sorted(rank for rank in partners if has_begun(ledger, function, rank))
    begin = time.monotonic()
    while True:
        waiting = [rank for rank in waiting if not ledger.store.check([_key(ledger, function, times, rank)])]
        waited = time.monotonic() - begin
        if not waiting or (
            waited > PATIENCE
            and (waited > MOST_PATIENT * PATIENCE or not any(is_compiling(ledger, rank) for rank in waiting))
        ):
            return waiting
        time.sleep(0.02)


def _key(ledger: Ledger, function: str, times: int, rank: int) -> str:
    return ledger.key((), f"{function} in eager", times, rank)


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
