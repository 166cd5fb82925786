"""Memory of a step of a program on this rank, in addition to that before the step, measured in two ways.

`resident_peak` counts pages of the process, including copies that backends make in their own threads, but not memory
that is allocated and never written to. `allocated_peak` counts allocations of torch's CPU allocator, on all threads.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
from collections.abc import Callable
from typing import Any

import torch

#: Option of ``mallopt``: blocks from this size on are mapped separately, so that freed ones return to the system at
#: once.
_MMAP_THRESHOLD, _MAPPED_FROM = -3, 1 << 16


def resident_peak(step: Callable[[], Any]) -> int:
    """The peak of resident memory in bytes while `step` runs, minus that before it. Linux only."""
    return_freed_memory()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def return_freed_memory() -> None:
    """Returns memory freed so far to the system, and makes larger blocks return when they are freed from now on. Linux
    only.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _MAPPED_FROM)
    libc.malloc_trim(0)


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
