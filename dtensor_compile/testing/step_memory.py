"""Memory that a step of a program takes on this rank, beyond what there is before it, by two instruments.

`resident_peak` counts pages of the process: also what backends copy in threads of their own, but not what is allocated
and never written to. `allocated_peak` counts what torch's allocator for the CPU gives out, on all threads.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
from collections.abc import Callable
from typing import Any

import torch

#: Of ``mallopt``: blocks from this size on are mapped by themselves, so that what is freed goes back to the system at
#: once.
_MMAP_THRESHOLD, _MAPPED_FROM = -3, 1 << 16


def resident_peak(step: Callable[[], Any]) -> int:
    """The peak of resident memory while `step` runs, beyond that before it. Linux only."""
    return_freed_memory()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def return_freed_memory() -> None:
    """Memory that is freed goes back to the system, now what was freed before and from then on all larger blocks. Linux
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
