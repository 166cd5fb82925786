"""How many collectives a program really runs, by the profiler: in eager, in hooks, in compiled code of any backend."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def collectives_run(program: Callable[[], object]) -> int:
    """Calls a program on this rank and counts the collectives that it runs on gloo groups.

    Messages between two ranks are none, but for those of which this backend makes a collective.

    Args:
        program: a step. It is called once; every rank of its groups has to call it.
    """
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        program()
    names = [event.name for event in seen.events()]
    of_gloo = sum(name.startswith("gloo:") and name not in ("gloo:send", "gloo:recv") for name in names)
    return of_gloo + sum(name.startswith("dtensor_compile::all_") for name in names)
