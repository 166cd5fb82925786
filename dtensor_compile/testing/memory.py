"""Memory that a step of a program takes on this rank, beyond what it holds before, as two instruments see it."""

from __future__ import annotations

import ctypes
import gc
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

#: Of ``mallopt``: blocks from this size on are mapped by themselves, so that what is freed goes back to the system at once.
_MMAP_THRESHOLD, _MAPPED_FROM = -3, 1 << 16


class Peak(NamedTuple):
    """The most bytes at one time that a call held beyond what was there before.

    Attributes:
        resident: pages of the process, also of what backends copy in threads of their own. Memory that is allocated and not written
            to is not part of it.
        allocated: of torch's allocator for the CPU, on all threads.
    """

    resident: int
    allocated: int


def peak_of(step: Callable[[], Any], before: Callable[[], Any] = gc.collect) -> Peak:
    """Both measurements of a step that may be called twice; `before` runs before each."""
    before()
    resident = resident_peak(step)
    before()
    return Peak(resident, allocated_peak(step))


def resident_peak(step: Callable[[], Any]) -> int:
    """The peak of resident memory while `step` runs, beyond that before it. Linux only."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _MAPPED_FROM)
    libc.malloc_trim(0)  # what was freed before that
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def allocated_peak(step: Callable[[], Any]) -> int:
    """The peak of bytes that torch allocates on the CPU while `step` runs, from the profiler's events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
