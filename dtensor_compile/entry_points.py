"""Targets of the package's entry points: ``torch.compile(model, backend="dtensor")`` loads
``dtensor_compile.entry_points:dtensor``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dtensor_compile import backend
from dtensor_compile.compat.dynamo.registry import register_again

_NAMES = ("dtensor", "dtensor_aten")
_lock = threading.Lock()


def __getattr__(name: str) -> Callable[..., Any]:
    """The backend of that name, for a thread that is about to register it."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _lock:
        register_again(name)
    return getattr(backend, name)
