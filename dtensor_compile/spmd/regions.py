"""Manual regions in a Dynamo graph: tensors that enter them implicitly, and tensors that must not leave them.

A plain tensor from outside that is used in a region is equal on all ranks. It enters the region replicated, by an
inserted `to_manual`, so that its gradient is summed over the devices.

    before   l = to_manual(x, ...); y = mul(l, w)
    after    l = to_manual(x, ...); v = to_manual(w, ..., ((), ()), (0, 1)); y = mul(l, v)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.dtensor.record import checkpointed, graphs_in
from dtensor_compile.errors import ManualRegionError
from dtensor_compile.graph.arguments import list_arg
from dtensor_compile.graph.nodes import source_line
from dtensor_compile.spmd.constraint import constrain
from dtensor_compile.spmd.in_place import memory_of, written_argument
from dtensor_compile.spmd.manual import from_manual, placed_from_manual, to_manual


class ManualRegion(NamedTuple):
    """The mesh of a region and its manual axes, including those of enclosing regions."""

    mesh: str
    axes: frozenset[int]


def enter_regions(gm: torch.fx.GraphModule) -> None:
    """Rewrites a graph, and those of its checkpointed regions, as the module docstring says.

    Raises:
        ManualRegionError: a tensor of a region is returned, is used with one of another region or a DTensor of global
            shape, or is written to a tensor from outside.
    """
    if any(part.graph.find_nodes(op="call_function", target=to_manual) for part in graphs_in(gm)):
        _enter_graph(gm.graph, {})


def _enter_graph(graph: torch.fx.Graph, given: Mapping[torch.fx.Node, ManualRegion]) -> None:
    """Rewrites a graph whose inputs are in the regions `given`; its results are in the same region, or outside if
    `given` is empty.
    """
    inside = dict(given)
    for node in list(graph.nodes):
        here = {inside[used] for used in node.all_input_nodes if used in inside}
        if node.op == "output":
            _refuse_results(node, inside, given)
        elif node.target is to_manual:
            outer = inside.get(node.args[0])
            if outer and outer.axes & set(node.args[3]):
                raise ManualRegionError(
                    f"a manual region is entered twice along an axis ({source_line(node)}): a nested one needs other"
                )
            inside[node] = ManualRegion(
                str(node.args[1]), frozenset(node.args[3]) | (outer.axes if outer else frozenset())
            )
        elif node.target is from_manual:
            node.target = placed_from_manual
            outer = inside.get(node.args[0])
            rest = outer.axes - set(node.args[3]) if outer else frozenset()
            if outer and rest:
                inside[node] = ManualRegion(outer.mesh, rest)
        elif len(here) > 1:
            names = ", ".join(used.name for used in node.all_input_nodes if used in inside)
            raise ManualRegionError(
                f"an operator mixes tensors of several manual regions: {names} ({source_line(node)}); close one first"
            )
        elif here:
            (region,) = here
            _refuse_marks(node, region)
            _refuse_writes(node, inside)
            _enter(graph, node, region, inside)
            inside[node] = region
        _enter_checkpoint(node, inside)


def _enter_checkpoint(node: torch.fx.Node, inside: Mapping[torch.fx.Node, ManualRegion]) -> None:
    part = checkpointed(node)
    if part is not None:
        pairs = zip(part.graph.find_nodes(op="placeholder"), node.args[1:])
        _enter_graph(
            part.graph,
            {inner: inside[used] for inner, used in pairs if isinstance(used, torch.fx.Node) and used in inside},
        )


def _enter(
    graph: torch.fx.Graph, node: torch.fx.Node, region: ManualRegion, inside: dict[torch.fx.Node, ManualRegion]
) -> None:
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
            entered = graph.call_function(
                to_manual, (used, region.mesh, ((),) * value.dim(), tuple(sorted(region.axes)))
            )
        entered.meta = {**used.meta}
        entered.meta.pop("grapharg", None)
        node.replace_input_with(used, entered)
        inside[entered] = region


def _refuse_marks(node: torch.fx.Node, region: ManualRegion) -> None:
    if node.target is constrain and region.axes & {axis for entry in list_arg(node, 2) for axis in entry}:
        raise ManualRegionError(
            f"a mark names an axis along which its tensor is manual already ({source_line(node)}): in a manual region "
            "a mark can only use other axes"
        )


def _refuse_writes(node: torch.fx.Node, inside: Mapping[torch.fx.Node, ManualRegion]) -> None:
    """Refuses writes of a region to a tensor from outside, which would then differ between devices."""
    written = written_argument(node)
    if written is not None and written not in inside and memory_of(written) is not None:
        raise ManualRegionError(
            f"{written.name} is a tensor from outside, and a manual region writes to it ({source_line(node)}): "
            "close the region first, and write the result of disable_manual_sharding"
        )


def _refuse_results(
    output: torch.fx.Node, inside: Mapping[torch.fx.Node, ManualRegion], given: Mapping[torch.fx.Node, ManualRegion]
) -> None:
    """Refuses results in regions; those of a checkpointed region with inputs in a region have to be in that region."""
    wanted = next(iter(given.values()), None)
    wrong = [node for node in output.all_input_nodes if inside.get(node) != wanted and memory_of(node) is not None]
    if wrong and wanted is None:
        names = "; ".join(
            f"{node.name} of shape {list(node.meta['example_value'].shape)} ({source_line(node)})" for node in wrong
        )
        raise ManualRegionError(
            f"tensors leave a manual region unclosed: {names}. Close them with disable_manual_sharding; a graph ends "
            "inside of a region also at a graph break, or where the program raises an exception"
        )
    if wrong:
        where = f"{wrong[0].name} ({source_line(wrong[0])})"
        raise ManualRegionError(f"a checkpointed region closes or opens a manual region around it: {where}")
