"""Number of collectives that a program runs, by the profiler: in eager, in hooks, in compiled code of any backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch.profiler import ProfilerActivity, profile


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """Yields a list that holds, after the scope, the number of collectives that this thread ran in it on gloo groups.

    Messages between two ranks do not count, except those that this backend replaces by a collective. Every rank of the
    groups that are used has to enter it.
    """
    found: list[int] = []
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield found
    names = [event.name for event in seen.events()]
    of_gloo = sum(name.startswith("gloo:") and name not in ("gloo:send", "gloo:recv") for name in names)
    found.append(of_gloo + sum(name.startswith("dtensor_compile::all_") for name in names))


def collectives_run(program: Callable[[], object]) -> int:
    """Number of collectives that a program runs on this rank (`counted_collectives`).

    Args:
        program: a step. It is called once; every rank of its groups has to call it.
    """
    with counted_collectives() as found:
        program()
    return found[0]
