"""Inputs of a graph that a wrapper gathered in eager.

Dynamo takes the memory of every parameter for fixed, and CUDA graphs rest on it. Parameters that ``fully_shard``
gathers outside of the compiled region, as it does for its root, are in other memory in each step: the graph would be
recorded anew in each. They are copied into memory of the graph instead, as other inputs are.

Upstream: not reported; with stock torch such a module breaks the graph at its hooks.
Releases: 2.11 to 2.15.
Remove when: Dynamo knows that ``fully_shard`` frees and allocates these parameters.
"""

from __future__ import annotations

import torch

from dtensor_compile.compat.distributed.fsdp import gathered_parameters
from dtensor_compile.compat.dynamo.observers.observe import forget_fixed_address
from dtensor_compile.decisions import Decision


def forget_addresses(program: torch.fx.GraphModule) -> list[Decision]:
    """Notes that the memory of gathered parameters is not fixed; for CUDA graphs."""
    gathered = gathered_parameters()
    copied = 0
    for node in program.graph.find_nodes(op="placeholder"):
        given = node.meta.get("grapharg")
        tensor = None if given is None else given.example
        if isinstance(tensor, torch.Tensor) and id(tensor) in gathered and forget_fixed_address(node):
            copied += getattr(tensor, "_local_tensor", tensor).nbytes
    if not copied:
        return []
    reason = "fully_shard gathers parameters before the region begins, in each step to other memory: they are copied"
    return [Decision("forget_addresses", "", reason, left_alone=True, bytes=copied)]
