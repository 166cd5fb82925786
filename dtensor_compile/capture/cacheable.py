"""Support for torch's on-disk caches: functions of ours that cached programs may call, reasons why others are not
cached."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.aot.fx import rename
from dtensor_compile.compat.dynamo.trackers.tracker_tools import kind_of_constant
from dtensor_compile.compat.inductor.compile import cache_refusal
from dtensor_compile.decisions import Decision


def survives_caches(gm: torch.fx.GraphModule) -> bool:
    """Whether the placements of a Dynamo graph's results can be written to a cache and read again.

    A masked partial placement (the result of a row-wise lookup, not reduced yet) comes back without its sizes.
    """
    returned = gm.graph.output_node().all_input_nodes
    values = [node.meta.get("example_value") for node in returned]
    placements = {placement for value in values if isinstance(value, DTensor) for placement in value.placements}
    return all(pickle.loads(pickle.dumps(placement)) == placement for placement in placements)


def cache_decisions(gm: torch.fx.GraphModule, functions: Sequence[Callable[..., Any]]) -> list[Decision]:
    """Decisions with the reasons why a Dynamo graph cannot be in the on-disk caches, so that every process compiles it;
    empty if it can.

    Args:
        functions: functions of ours that a cached graph may call: their effect is determined by their tensors, meshes,
            placements, text and integers, which are part of the cache key.
    """
    reasons = [] if survives_caches(gm) else ["a result has a placement that a cache cannot write and read again"]
    refused = cache_refusal(gm, functions)
    reasons += [refused] if refused else []
    return [
        Decision("cache", "", f"every process compiles it: {reason}", "compiled graph", "not kept", left_alone=True)
        for reason in reasons
    ]


def name_constants(gm: torch.fx.GraphModule) -> None:
    """Names the inputs of a graph for objects that tracing made or found by their kind and order.

    Dynamo names them by the address of the object and the number of the frame, and their names are part of the keys of
    torch's caches: in another process, the graph would never be found.
    """
    kinds: Counter[str] = Counter()
    for node in gm.graph.find_nodes(op="placeholder"):
        if kind := kind_of_constant(str(node.target)):
            rename(node, f"constant_{kind}_{kinds[kind]}")
            node.target = node.name
            kinds[kind] += 1
