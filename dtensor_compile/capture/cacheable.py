"""Programs whose compiled form cannot be kept in a cache between processes."""

from __future__ import annotations

import pickle

import torch
from torch.distributed.tensor import DTensor


def survives_caches(gm: torch.fx.GraphModule) -> bool:
    """Whether the placements of a Dynamo graph's results can be written to a cache and read again.

    A masked partial placement (the result of a row-wise lookup, not reduced yet) comes back without its sizes.
    """
    (results,) = gm.graph.output_node().args
    values = [node.meta.get("example_value") for node in results if isinstance(node, torch.fx.Node)]
    placements = {placement for value in values if isinstance(value, DTensor) for placement in value.placements}
    return all(pickle.loads(pickle.dumps(placement)) == placement for placement in placements)
