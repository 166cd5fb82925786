"""Dynamo's counters of this process."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters


def graph_breaks() -> int:
    """The number of graph breaks since the last `reset`."""
    return sum(counters["graph_break"].values())


def graphs() -> int:
    """The number of graphs that Dynamo captured since the last `reset`, recompilations included."""
    return int(counters["stats"]["unique_graphs"])


def cached_programs() -> int:
    """The number of programs that AOTAutograd found in its cache since the last `reset`."""
    return int(counters["aot_autograd"]["autograd_cache_hit"])


def reset() -> None:
    """Discards all compiled functions and sets the counters to zero."""
    torch._dynamo.reset()
    counters.clear()
