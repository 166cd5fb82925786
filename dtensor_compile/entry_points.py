"""Targets of the package's entry points: ``torch.compile(model, backend="dtensor")`` loads
``dtensor_compile.entry_points:dtensor``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any


def _announce(error: Exception) -> None:
    """Tells the other ranks of the job, which may wait for this one, as far as the package works."""
    with contextlib.suppress(Exception):
        from dtensor_compile.store.failed_ranks import announce_failure

        announce_failure("import the backend", error)


try:
    from dtensor_compile import backend
    from dtensor_compile.compat.dynamo.registry import register_again
except Exception as error:
    _announce(error)
    raise

_NAMES = ("dtensor", "dtensor_aten")
_lock = threading.Lock()


def __getattr__(name: str) -> Callable[..., Any]:
    """The backend of that name, for a thread that is about to register it."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _lock:
        register_again(name)
    return getattr(backend, name)
