"""Ends the compilation if a redistribution has no plan within ``redistribution_memory``, before the joint graph is
partitioned.

In: the joint graph after the passes, since these may replace redistributions. Out: nothing, or a `PlanError` that names
the tensor, its module and the user's line, the memory needed, and an alternative within the bound. The result is the
same on every rank of the mesh: plans depend on specs and global sizes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dtensor_compile.errors import MemoryBudgetError, PlanError
from dtensor_compile.graph.arguments import const_arg, list_arg, sizes_of, value_of
from dtensor_compile.graph.node_costs import module_path
from dtensor_compile.graph.nodes import across, redistribution_of, redistributions, source_line
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ops.redistribute import plan_of
from dtensor_compile.ops.redistribute_across import across_plan_of
from dtensor_compile.topology.network import current_memory


def check_memory(graph: torch.fx.Graph) -> None:
    """Raises `PlanError` for the first redistribution of `graph` that has no plan within the bound of this thread."""
    if current_memory() is None:
        return
    for node in redistributions(graph):
        this = redistribution_of(node)
        _check(node, functools.partial(plan_of, this.source, this.target, parse_mesh(this.mesh)), this.sizes)
    for node in across(graph):
        source, target, mesh, other = (const_arg(node, place, str) for place in range(1, 5))
        _check(node, functools.partial(across_plan_of, source, target, mesh, other), sizes_of(list_arg(node, 5)))


def _check(node: torch.fx.Node, plan: Callable[[list[Any], int], object], shape: list[Any]) -> None:
    try:
        plan(shape, value_of(node).element_size())
    except MemoryBudgetError as error:
        module = f" of module {module_path(node)}" if module_path(node) else ""
        dtype = str(value_of(node).dtype).removeprefix("torch.")
        raise PlanError(f"{node.args[0]}{module}, {dtype} {shape}, at {source_line(node)}: {error}") from error
