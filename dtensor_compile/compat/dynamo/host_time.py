"""The guards of compiled code by themselves, to measure what they cost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch._dynamo.eval_frame import _debug_get_cache_entry_list


def checks_of_guards(function: Callable[..., Any], local_variables: Mapping[str, Any]) -> Callable[[], bool]:
    """What checks the guards of the compiled code of `function` that holds for these local variables of its frame.

    Raises:
        LookupError: none was compiled for them.
    """
    for entry in _debug_get_cache_entry_list(inspect.unwrap(function).__code__):
        check, frame = entry.guard_manager.check, dict(local_variables)
        if check(frame):
            return lambda: check(frame)
    raise LookupError(f"{function} was not compiled for {sorted(local_variables)}")
