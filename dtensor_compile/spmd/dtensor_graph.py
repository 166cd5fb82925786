"""A Dynamo graph whose nodes are computed over fake DTensors, and edits of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.node_builder import inherited
from dtensor_compile.graph.nodes import source_line
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.spmd.constraint import whole, whole_copy, write_whole
from dtensor_compile.spmd.in_place import function_name, written_argument


class DTensorGraph:
    """A graph on a mesh, with the values of its nodes.

    Attributes:
        values: of the nodes that were computed.
        was_plain: nodes whose values were plain tensors in the program.
        decisions: decisions so far.
        mesh_shape, text: of the mesh.
    """

    def __init__(self, gm: torch.fx.GraphModule, mesh: DeviceMesh) -> None:
        self.gm, self.graph, self.mesh = gm, gm.graph, mesh
        self.decisions: list[Decision] = []
        self.mesh_shape, self.text = tuple(mesh.shape), mesh_text(mesh)
        self.values: dict[torch.fx.Node, Any] = {}
        self.was_plain = {node for node in self.graph.nodes if not isinstance(node.meta.get("example_value"), DTensor)}

    def compute(self, node: torch.fx.Node) -> None:
        """Computes the value of a node, after converting its arguments if needed."""
        raise NotImplementedError

    def is_cut(self, node: torch.fx.Node | None) -> bool:
        """Whether the value of a node is a DTensor that differs between ranks."""
        value = self.values.get(node) if node is not None else None
        return isinstance(value, DTensor) and not all(p.is_replicate() for p in value.placements)

    def take_whole(self, node: torch.fx.Node, reason: str) -> None:
        """Passes full, plain tensors to a node, so that every rank computes the plain program."""
        gathered, written = 0, written_argument(node)
        for used in node.all_input_nodes:
            value = self.values[used]
            if isinstance(value, DTensor):
                gathered += (
                    0 if all(p.is_replicate() for p in value.placements) else int(value.numel()) * value.element_size()
                )
                self.replace_argument(node, used, whole_copy if used is written else whole)
        why = f"{function_name(node)} runs on full tensors, {gathered:,} bytes gathered: {reason}"
        self.decisions.append(Decision("replicate_fallback", source_line(node), why))

    def replace_argument(
        self, node: torch.fx.Node, used: torch.fx.Node, function: Callable[..., Any], *args: Any
    ) -> torch.fx.Node:
        """Replaces an argument of a node by the result of a function of that argument; returns the new node."""
        with self.graph.inserting_before(node):
            made = self.graph.call_function(function, (used, *args))
        made.meta = inherited(used, ("grapharg",))
        node.replace_input_with(used, made)
        self.compute(made)
        return made

    def write_back(self, node: torch.fx.Node, written: torch.fx.Node, copy: torch.fx.Node) -> None:
        """Writes the values that a node wrote to a full copy back to the DTensor that was copied."""
        with self.graph.inserting_after(node):
            back = self.graph.call_function(write_whole, (written, copy))
        back.meta = inherited(written, ("grapharg",))
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
        if written in self.was_plain:
            self.was_plain.add(back)
        self.compute(back)

    def insert(
        self, behind: torch.fx.Node, like: torch.fx.Node, function: Callable[..., Any], *args: Any
    ) -> torch.fx.Node:
        """Inserts a call behind a node, and replaces its first argument, `like`, by it in all users of `like`."""
        with self.graph.inserting_after(behind):
            node = self.graph.call_function(function, (like, *args))
        node.meta = inherited(like, ("grapharg",))
        like.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
        if like in self.was_plain:
            self.was_plain.add(node)
        self.compute(node)
        return node

    def over_mesh(self, placements: Sequence[Placement], here: Sequence[int]) -> list[Placement]:
        """Extends placements over these dims of the mesh to the whole mesh. The other dims are manual, and replicated
        here.
        """
        made: list[Placement] = [Replicate()] * len(self.mesh_shape)
        for dim, placement in zip(here, placements):
            made[dim] = placement
        return made
