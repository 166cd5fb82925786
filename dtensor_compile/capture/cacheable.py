"""What torch's caches between processes keep of a program: the calls of ours that they may, and the programs that they cannot."""

from __future__ import annotations

import pickle

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.inductor.compile import cache_refusal
from dtensor_compile.capture.cross_mesh import redistribute
from dtensor_compile.decisions import Decision
from dtensor_compile.spmd.barrier import border
from dtensor_compile.spmd.constraint import agree, constrain, ones_of, replicated, update_statistics, whole, whole_copy, write_whole
from dtensor_compile.spmd.manual import from_manual, placed_from_manual, to_manual
from dtensor_compile.spmd.recurrent import recurrent_layer

#: Functions of ours in a Dynamo graph that say all they do by their tensors, meshes, placements, text and integers, which are in the
#: key of a cache.
GRAPH_FUNCTIONS = (
    agree, border, constrain, from_manual, ones_of, placed_from_manual, recurrent_layer, redistribute, replicated, to_manual,
    update_statistics, whole, whole_copy, write_whole,
)  # fmt: skip


def survives_caches(gm: torch.fx.GraphModule) -> bool:
    """Whether the placements of a Dynamo graph's results can be written to a cache and read again.

    A masked partial placement (the result of a row-wise lookup, not reduced yet) comes back without its sizes.
    """
    (results,) = gm.graph.output_node().args
    values = [node.meta.get("example_value") for node in results if isinstance(node, torch.fx.Node)]
    placements = {placement for value in values if isinstance(value, DTensor) for placement in value.placements}
    return all(pickle.loads(pickle.dumps(placement)) == placement for placement in placements)


def cache_decisions(gm: torch.fx.GraphModule) -> list[Decision]:
    """What keeps a Dynamo graph out of the caches on disk, so that another process compiles it again; empty where nothing does."""
    reasons = [] if survives_caches(gm) else ["a result has a placement that a cache cannot write and read again"]
    refused = cache_refusal(gm, GRAPH_FUNCTIONS)
    reasons += [refused] if refused else []
    return [Decision("cache", "", f"every process compiles it: {reason}", "compiled graph", "not kept", left_alone=True) for reason in reasons]
