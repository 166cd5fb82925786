"""Adds the common base of outputs that are views of one value to the outputs.

    before   h = x * 2; return h.view(-1), h.t()
    after    h = x * 2; return h.view(-1), h.t(), h        # the caller gets the first two

In: Dynamo's graph over DTensors. Autograd has to know that such outputs share memory, so AOTAutograd regenerates each
from their base after the graph has run. For DTensors it does so if the base is an output itself, and fails if it would
have to add it.

Upstream: https://github.com/pytorch/pytorch/issues/184002 ([DTensor][Compile] Compile fails when DTensor function
    returns an aliased output); https://github.com/pytorch/pytorch/issues/172549 (AOTAutograd error when compiled graph
    has two DTensor outputs that alias each other, one differentiable one not).
Releases: 2.11 to 2.15.
Remove when: AOTAutograd returns the intermediate base of DTensor results itself (pull request 184367).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.dtensor.specs import local_and_spec, storage_of
from dtensor_compile.graph.arguments import list_arg


def return_bases(gm: torch.fx.GraphModule) -> int:
    """Appends the common bases of aliased outputs to the outputs of `gm`; returns their number."""
    output = gm.graph.output_node()
    results = list_arg(output, 0)
    made = {
        id(node.meta.get("example_value")): node
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method")
    }
    placed = {
        node: node.meta["example_value"] for node in results if isinstance(node, torch.fx.Node) and _is_placed(node)
    }
    sharing = Counter(map(_memory, placed.values()))
    views = [
        value for node, value in placed.items() if node.target is not operator.getitem
    ]  # pieces of a split are results like others
    bases = [view._base for view in views if view._base is not None and view._base.requires_grad]
    wanted = {id(base): made[id(base)] for base in bases if id(base) in made and sharing[_memory(base)] > 1}
    added = [node for node in wanted.values() if node not in results]
    if added:
        output.args = ((*results, *added),)
        gm.recompile()
    return len(added)


def _is_placed(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), DTensor)


def _memory(x: DTensor) -> int:
    return storage_of(local_and_spec(x)[0])


def without_bases(compiled: Callable[..., Any], bases: int) -> Callable[..., Any]:
    """`compiled` without its last outputs, the bases that were added."""
    if not bases:
        return compiled

    def run(*args: Any) -> Any:
        return compiled(*args)[:-bases]

    return run
