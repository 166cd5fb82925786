"""Reports the end, and errors, of runs of a compiled graph to the agreement of the ranks.

Errors of most graphs pass through Python code around them anyway (`compat.aot.unwrap`), where a ``try`` takes no time.
Only graphs over plain tensors that take no gradient, and those that run before all ranks have answered, get a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtensor_compile.runtime.collective_agreement import Agreement
from dtensor_compile.store.ledger import current_ledger


def watched(compiled: Callable[..., Any], agreement: Agreement) -> Callable[..., Any]:
    """`compiled`, with ``agreement.has_run`` called after its first call, and with its errors; unchanged if all ranks
    have answered, and errors are explained without it.
    """
    ledger = current_ledger()
    communicates = ledger is not None and bool(ledger.partners.get(agreement.function))
    if not agreement.unanswered and (agreement.explains or not communicates):
        return compiled

    def run(*args: Any) -> Any:
        try:
            results = compiled(*args)
        except Exception as error:
            agreement.has_run(error)
            raise
        if agreement.unanswered:
            agreement.has_run()
        return results

    return run
