"""What Dynamo counted in this process."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters


def graph_breaks() -> int:
    """Graph breaks since the last `reset`."""
    return sum(counters["graph_break"].values())


def graphs() -> int:
    """Graphs that Dynamo captured since the last `reset`, recompilations included."""
    return int(counters["stats"]["unique_graphs"])


def reset() -> None:
    """Forgets every compiled function and sets the counters to zero."""
    torch._dynamo.reset()
    counters.clear()
