"""A polling thread for the time that this rank may be blocked in a collective.

It starts with the first polling function and ends with the last, and keeps neither the process nor the store alive: it
is a daemon, and is stopped before the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable

#: Seconds between two polls.
PAUSE = 1.0

_looks: list[Callable[[], bool]] = []
_lock = threading.Lock()
_stopped = threading.Event()


class _Current:
    """The running thread; None before the first polling function and after the last."""

    thread: threading.Thread | None = None


def look_out(look: Callable[[], bool]) -> Callable[[], None]:
    """Calls `look` in a thread, every `PAUSE` seconds, until it returns True or raises RuntimeError (the store is
    gone).

    Returns:
        A function that stops it.
    """
    with _lock:
        _looks.append(look)
        thread = _Current.thread
        if thread is None or not thread.is_alive():  # a forked process has no threads of its parent
            _Current.thread = threading.Thread(target=_run, name="dtensor_compile: late ranks", daemon=True)
            _Current.thread.start()

    def end() -> None:
        with _lock, contextlib.suppress(ValueError):
            _looks.remove(look)

    return end


def _run() -> None:
    while not _stopped.wait(PAUSE):
        for look in list(_looks):
            try:
                ends = look()
            except RuntimeError:
                ends = True
            with _lock, contextlib.suppress(ValueError):
                if ends:
                    _looks.remove(look)
        with _lock:
            if not _looks:
                _Current.thread = None
                return


@atexit.register
def _stop() -> None:
    """Ends the thread before the interpreter ends: a thread that returns from a C++ call afterwards would end the
    process.
    """
    _stopped.set()
    if (thread := _Current.thread) is not None:
        thread.join(timeout=2.0)  # it may be in a call to a store that does not answer
