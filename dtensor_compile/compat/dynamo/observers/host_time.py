"""The guards of compiled code on their own, to measure their cost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch._dynamo.eval_frame import _debug_get_cache_entry_list


def checks_of_guards(function: Callable[..., Any], local_variables: Mapping[str, Any]) -> Callable[[], bool]:
    """A function that checks the guards of the compiled code of `function` that is valid for these local variables.

    Raises:
        LookupError: no code was compiled for them.
    """
    for entry in _debug_get_cache_entry_list(inspect.unwrap(function).__code__):
        check, frame = entry.guard_manager.check, dict(local_variables)
        if check(frame):
            return lambda: check(frame)
    raise LookupError(f"{function} was not compiled for {sorted(local_variables)}")
