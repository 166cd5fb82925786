"""Support for torch's on-disk caches: functions of ours that cached programs may call, uncacheable programs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

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
