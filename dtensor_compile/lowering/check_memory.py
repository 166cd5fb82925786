"""Redistributions that no plan carries out within ``redistribution_memory`` end the compilation, before it is divided
into graphs.

In: the joint graph behind the passes, since these may replace a redistribution by another. Out: nothing, or a
`PlanError` that names the tensor, its module and the user's line, what is needed, and what would be within the bound.
The same on every rank of the mesh: plans depend on specs and global sizes alone.
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor_compile.errors import MemoryBudgetError, PlanError
from dtensor_compile.graph.node_costs import module_path
from dtensor_compile.graph.nodes import across, read, redistributions, source_line
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ops.redistribute import plan_of
from dtensor_compile.ops.redistribute_across import across_plan_of
from dtensor_compile.topology.network import current_memory


def check_memory(graph: torch.fx.Graph) -> None:
    """Raises `PlanError` for the first redistribution of `graph` that has no plan within the bound of this thread."""
    if current_memory() is None:
        return
    for node in redistributions(graph):
        this = read(node)
        _check(
            node,
            lambda shape: plan_of(this.source, this.target, parse_mesh(this.mesh), shape, _itemsize(node)),
            this.shape,
        )  # noqa: B023
    for node in across(graph):
        texts, sizes = node.args[1:5], node.args[5]
        _check(node, lambda shape: across_plan_of(*texts, shape, _itemsize(node)), sizes)  # noqa: B023


def _itemsize(node: torch.fx.Node) -> int:
    return int(node.meta["val"].element_size())


def _check(node: torch.fx.Node, plan: Any, sizes: Any) -> None:
    shape = [size.meta["val"] if isinstance(size, torch.fx.Node) else size for size in sizes]
    try:
        plan(shape)
    except MemoryBudgetError as error:
        module = f" of module {module_path(node)}" if module_path(node) else ""
        dtype = str(node.meta["val"].dtype).removeprefix("torch.")
        raise PlanError(f"{node.args[0]}{module}, {dtype} {shape}, at {source_line(node)}: {error}") from error
