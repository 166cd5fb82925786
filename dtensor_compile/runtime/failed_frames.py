"""Frames that Dynamo does not compile on this rank: announced to the other ranks before the program gets the error.

Errors in this backend are announced where they are raised (`Agreement.announcing_failures`); these are raised while
Dynamo traces the frame, before it calls the backend.
"""

from __future__ import annotations

import types

import torch.distributed as dist

from dtensor_compile.compat.dynamo.recompile_limits import Fate, reaches_recompile_limit
from dtensor_compile.runtime.eager_fallback import fall_back_together
from dtensor_compile.runtime.waiting import failure_key, function_name, while_the_store_is_there
from dtensor_compile.store.failed_ranks import announce_failure, first_line, is_announced
from dtensor_compile.store.ledger import current_ledger


def frame_failed(code: types.CodeType, error: Exception, fate: Fate) -> None:
    """Called with an error that ends the compilation of a frame.

    Args:
        fate: Dynamo's handling of the error.

    Raises:
        AgreementError: the frame would run in eager on this rank only.
    """
    ledger = current_ledger()
    if ledger is None:
        return
    limit = reaches_recompile_limit(error)
    if fate is not Fate.GOES_ON and not is_announced(error):
        function = function_name(code)
        with while_the_store_is_there():
            announce_failure(f"compile {function}", error)
            if not limit:  # else the others have a graph that they run
                time = ledger.compilations[function] = ledger.compilations.get(function, 0) + 1
                ledger.store.set(failure_key(ledger, function, time, 0, dist.get_rank()), first_line(error))
    if fate is Fate.SUPPRESSED or (fate is Fate.GOES_ON and limit):
        fall_back_together(code, error)
