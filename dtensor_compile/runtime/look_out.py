"""A thread that looks for something again and again, while this rank may be blocked in a collective.

It starts with the first thing to look for and ends with the last, and keeps neither the process alive nor the store: it
is a daemon, told to stop before the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable

#: Seconds between two looks.
PAUSE = 1.0

_looks: list[Callable[[], bool]] = []
_lock = threading.Lock()
_stopped = threading.Event()


class _Current:
    """The thread that runs; None before the first thing to look for and after the last."""

    thread: threading.Thread | None = None


def look_out(look: Callable[[], bool]) -> Callable[[], None]:
    """Calls `look` in a thread, every `PAUSE` seconds, until it returns True or raises RuntimeError (the store is
    gone).

    Returns:
        A function that ends this.
    """
    with _lock:
        _looks.append(look)
        thread = _Current.thread
        if thread is None or not thread.is_alive():  # a forked process has none of its parent's threads
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
    """Has the thread end before the interpreter does: one that comes back from a call in C++ afterwards would end the
    process.
    """
    _stopped.set()
    if (thread := _Current.thread) is not None:
        thread.join(timeout=2.0)  # it may be in a call that waits for a store that does not answer
