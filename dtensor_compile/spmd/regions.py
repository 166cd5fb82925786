"""Manual regions in a Dynamo graph: what enters them without a word, and what must not leave them.

A plain tensor from outside that is used in a region is equal on all ranks. It enters the region whole, by a `to_manual` of its own, so
that its gradient is the sum of what the devices did with it.

    before   l = to_manual(x, ...); y = mul(l, w)
    after    l = to_manual(x, ...); v = to_manual(w, ..., ((), ()), (0, 1)); y = mul(l, v)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.errors import ManualRegionError
from dtensor_compile.passes.nodes import source_line
from dtensor_compile.spmd.manual import from_manual, placed_from_manual, to_manual


class Region(NamedTuple):
    """The mesh of a region and its manual axes, those of the regions around it included."""

    mesh: str
    axes: frozenset[int]


def enter_regions(graph: torch.fx.Graph) -> None:
    """Rewrites the graph as the module says.

    Raises:
        ManualRegionError: a tensor of a region is returned, meets one of another region, or a DTensor of global shape.
    """
    if not graph.find_nodes(op="call_function", target=to_manual):
        return
    inside: dict[torch.fx.Node, Region] = {}
    for node in list(graph.nodes):
        here = {inside[used] for used in node.all_input_nodes if used in inside}
        if node.op == "output":
            _refuse_results(node, inside)
        elif node.target is to_manual:
            outer = inside.get(node.args[0])
            inside[node] = Region(str(node.args[1]), frozenset(node.args[3]) | (outer.axes if outer else frozenset()))
        elif node.target is from_manual:
            node.target = placed_from_manual
            outer = inside.get(node.args[0])
            rest = outer.axes - set(node.args[3]) if outer else frozenset()
            if outer and rest:
                inside[node] = Region(outer.mesh, rest)
        elif len(here) > 1:
            names = ", ".join(used.name for used in node.all_input_nodes if used in inside)
            raise ManualRegionError(f"tensors of several manual regions meet: {names} ({source_line(node)}); close one region first")
        elif here:
            (region,) = here
            _enter(graph, node, region, inside)
            inside[node] = region


def _enter(graph: torch.fx.Graph, node: torch.fx.Node, region: Region, inside: dict[torch.fx.Node, Region]) -> None:
    for used in node.all_input_nodes:
        value: Any = used.meta.get("example_value")
        if used in inside or not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, DTensor):
            raise ManualRegionError(
                f"{used.name} has its global shape, and is used in a manual region ({source_line(node)}): "
                "take it in by enable_manual_sharding"
            )
        with graph.inserting_before(node):
            entered = graph.call_function(to_manual, (used, region.mesh, ((),) * value.dim(), tuple(sorted(region.axes))))
        entered.meta = {**used.meta}
        entered.meta.pop("grapharg", None)
        node.replace_input_with(used, entered)
        inside[entered] = region


def _refuse_results(output: torch.fx.Node, inside: dict[torch.fx.Node, Region]) -> None:
    unclosed = [node for node in output.all_input_nodes if node in inside]
    if unclosed:
        names = "; ".join(f"{node.name} of shape {list(node.meta['example_value'].shape)} ({source_line(node)})" for node in unclosed)
        raise ManualRegionError(f"tensors leave a manual region unclosed: {names}. Close them with disable_manual_sharding")
