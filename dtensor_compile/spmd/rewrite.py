"""Makes a Dynamo graph run on DTensors: places inputs, redistributes intermediates, makes results plain again.

Input: the graph, and the placements that the propagation found for its tensors (``spread.py``). Output: the same graph
over DTensors, with the inputs and outputs of the original.

Correctness: a replicated DTensor is equivalent to the plain tensor, DTensor's rules are correct for any placements, and
outputs that were plain are made full. Gradients of plain inputs are made full by the backward of the same step.
Sharding a tensor that every rank has sends nothing; making its gradient full sends it once, which storing the parameter
in shards (`shard_module`) saves.

- If DTensor leaves an intermediate replicated that the propagation shards, or partial, a redistribution is inserted.
- The mean of a loss over targets of which some are ignored is a sum over a sum, both over all ranks.
- A convolution runs on shards of the batch: DTensor has a rule for that, and accepts arguments with any placements.
- A function that cannot run on its shards runs on full tensors on every rank; a decision reports the bytes. The tensor
  that it writes to in place is sharded again.
- Random numbers are those of the plain program: every rank draws them for the full tensor. Dropout is a multiplication
  with such numbers, and sends nothing.
- A tensor that is written in place and seen through another view stays full (``in_place.py``).
- A checkpointed region is rewritten like the graph around it.

    before   y = conv2d(x, w)                       x: S(0)R, w: RS(0)
    after    v = constrain(w, replicated); y = conv2d(x, v)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_compile.capture.trace import capture_redistributions
from dtensor_compile.compat.dtensor.record import (
    DrawsOnShards,
    checkpointed,
    fake_like,
    refusing_draws,
    run_node,
    tracing_mode,
)
from dtensor_compile.compat.dtensor.specs import StridedShard
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.spmd.constraint import (
    constrain,
    ones_of,
    replicated,
    update_statistics,
    whole,
    whole_copy,
    write_whole,
)
from dtensor_compile.spmd.dtensor_graph import DTensorGraph
from dtensor_compile.spmd.function_rules import draw_whole, prepare
from dtensor_compile.spmd.in_place import function_name, stay_whole, written_argument
from dtensor_compile.spmd.logical_mesh import dims_in
from dtensor_compile.spmd.other_ranks import fails_on_some_rank
from dtensor_compile.spmd.partition_spec import Axes, axes_to_placements, placements_to_axes
from dtensor_compile.spmd.propagate import Sharding


class Rewrite(DTensorGraph):
    """Runs the graph once more, now over fake DTensors, and inserts conversions between its nodes."""

    def __init__(
        self, gm: torch.fx.GraphModule, mesh: DeviceMesh, wanted: dict[torch.fx.Node, Sharding], fall_back: bool
    ) -> None:
        super().__init__(gm, mesh)
        self.wanted, self.fall_back = wanted, fall_back
        self.stay_whole = stay_whole(self.graph)

    def run(self) -> None:
        """Rewrites the graph."""
        nodes = list(self.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        # torch's own analysis uses this rank's part of symbolic sizes.
        with tracing_mode() as mode, capture_redistributions():
            for node in placeholders:
                self.values[node] = fake_like(mode, node.meta["example_value"])
            for node in reversed(placeholders):  # each goes right after the last one, so that the first comes first
                self._place_input(node, placeholders[-1])
            for node in nodes[len(placeholders) :]:
                if node.op == "output":
                    self._make_results_plain(node)
                else:
                    self._rewrite(node)

    def run_inside(self, around: Rewrite, arguments: Sequence[Any]) -> Any:
        """Rewrites the graph of a checkpointed region; returns its results with their placements.

        Args:
            around: the rewrite of the graph that runs the region, on these arguments.
        """
        self.decisions = around.decisions
        nodes = list(self.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.values.update(zip(placeholders, arguments, strict=True))
        for node in nodes[len(placeholders) : -1]:
            self._rewrite(node)
        return torch.fx.map_arg(nodes[-1].args[0], lambda node: self.values[node])

    def _rewrite(self, node: torch.fx.Node) -> None:
        self.compute(node)
        if node not in self.stay_whole:
            self._place(node)
        elif isinstance(self.values[node], DTensor):
            self.insert(node, node, whole_copy)

    def compute(self, node: torch.fx.Node) -> None:
        prepare(self, node)
        written = written_argument(node)
        if function_name(node) in ("setitem", "__setitem__") and self.is_cut(written):
            self.take_whole(node, "the assigned elements may be in the shard of another rank")
        self._mix(node, written)
        value = self.values[node] = self._value(node)
        copy = written_argument(node)
        if written is not None and copy is not None and copy is not written:
            self.write_back(node, written, copy)
        was = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            node.meta["example_value"] = value
            if isinstance(was, DTensor) and not isinstance(value, DTensor) and node.target not in _PLACING:
                # It fell back to full tensors, and is a DTensor in the program: in a manual region, over the axes that
                # are not manual.
                self.insert(node, node, replicated, self.text, tuple(dims_in(self.mesh, was.device_mesh)))

    def _value(self, node: torch.fx.Node) -> Any:
        """The value of a node, on its arguments or, if it cannot run on those, on full tensors."""
        as_it_is = node.target in _PLACING or checkpointed(node) is not None
        try:
            failed = None if as_it_is else fails_on_some_rank(self.gm, node, self.values)
            if failed is not None:
                raise failed
            return self._run(node)
        except DrawsOnShards:
            return draw_whole(self, node)
        except Exception as error:
            given = any(isinstance(self.values[used], DTensor) for used in node.all_input_nodes)
            if not self.fall_back or not given or as_it_is:
                raise
            self.take_whole(node, next(iter(str(error).splitlines()), type(error).__name__))
            return run_node(self.gm, node, self.values)

    def _run(self, node: torch.fx.Node) -> Any:
        inside = checkpointed(node)
        if inside is not None:
            given = [self.values[x] if isinstance(x, torch.fx.Node) else x for x in node.args[1:]]
            return Rewrite(inside, self.mesh, self.wanted, self.fall_back).run_inside(self, given)
        with refusing_draws():
            return run_node(self.gm, node, self.values)

    def _mix(self, node: torch.fx.Node, written: torch.fx.Node | None) -> None:
        """Converts mixed plain and DTensor arguments of a node so that its backward works: a plain tensor that requires
        a gradient gets a plain one. A value that is written to a plain tensor becomes plain."""
        if node.target in _PLACING:
            return
        values = {
            used: self.values[used] for used in node.all_input_nodes if isinstance(self.values[used], torch.Tensor)
        }
        placed = [
            used for used, x in values.items() if isinstance(x, DTensor) and mesh_text(x.device_mesh) == self.text
        ]
        if placed and written in values and not isinstance(values[written], DTensor):
            for used in placed:
                self.replace_argument(node, used, whole)
        elif placed:
            for used, x in values.items():
                if not isinstance(x, DTensor) and x.requires_grad:
                    self.replace_argument(node, used, replicated, self.text)

    def _place_input(self, node: torch.fx.Node, last: torch.fx.Node) -> None:
        """Makes a DTensor of a plain input that requires a gradient or is sharded. Others stay plain, and count as
        replicated beside a DTensor; so do inputs that are written to, which the caller sees. The gradient of a DTensor
        has the placements of the DTensor."""
        value, sharding = self.values[node], self.wanted.get(node)
        cut = sharding is not None and any(sharding.axes)
        if not isinstance(value, torch.Tensor) or not node.users or node in self.stay_whole:
            return
        if isinstance(value, DTensor):
            partial = any(p.is_partial() for p in value.placements)
            if value.requires_grad and not partial and mesh_text(value.device_mesh) == self.text:
                axes = placements_to_axes(value.placements, self.mesh_shape, value.dim())
                self.insert(last, node, constrain, self.text, axes, True)
            return
        if value.requires_grad or cut:
            made = self.insert(last, node, replicated, self.text)
            if sharding is not None and cut:
                self.insert(made, made, constrain, self.text, sharding.axes, False)

    def _place(self, node: torch.fx.Node) -> None:
        """Redistributes an intermediate that is replicated or partial where the propagation shards it. Also
        constrains one whose gradient would be partial, because matmuls use it unsharded with sharded operands: the
        terms of the gradient are added first, and sent once."""
        value, sharding = self.values[node], self.wanted.get(node)
        if not isinstance(value, DTensor) or sharding is None or node.target is constrain:
            return
        here = dims_in(self.mesh, value.device_mesh)
        axes = self._other_axes(value, sharding, here)
        gradient = value.requires_grad and any(self._adds_axes(user, sharding) for user in node.users)
        if axes is None and gradient:
            axes = placements_to_axes(self.over_mesh(value.placements, here), self.mesh_shape, value.dim())
        if axes is not None:
            self.insert(node, node, constrain, self.text, axes, gradient)

    def _other_axes(self, value: DTensor, sharding: Sharding, here: Sequence[int]) -> Axes | None:
        """The axes for a DTensor over these dims of the mesh that the propagation shards along an axis along which it
        is replicated or partial; None for others. Shardings chosen by DTensor stay."""
        wanted, target, changes = axes_to_placements(sharding.axes, self.mesh_shape), [], False
        for have, want in zip(value.placements, [wanted[dim] for dim in here]):
            cut, wants_cut = (isinstance(p, (Shard, StridedShard)) for p in (have, want))
            changes = changes or have.is_partial() or (wants_cut and not cut)
            target.append(have if cut else want if wants_cut else Replicate())
        return placements_to_axes(self.over_mesh(target, here), self.mesh_shape, value.dim()) if changes else None

    def _adds_axes(self, user: torch.fx.Node, sharding: Sharding) -> bool:
        """Whether a matmul is sharded along an axis that does not shard this operand."""
        made = self.wanted.get(user)
        have = {axis for entry in sharding.cuts for axis in entry}
        return (
            made is not None
            and function_name(user) in _PRODUCTS
            and not {axis for entry in made.cuts for axis in entry} <= have
        )

    def _make_results_plain(self, output: torch.fx.Node) -> None:
        """Makes results plain that Dynamo knows as plain tensors."""
        made: dict[torch.fx.Node, torch.fx.Node] = {}

        def plain(node: torch.fx.Node) -> torch.fx.Node:
            if not isinstance(self.values.get(node), DTensor) or node not in self.was_plain:
                return node
            if node not in made:
                with self.graph.inserting_before(output):
                    made[node] = self.graph.call_function(whole, (node,))
                made[node].meta = dict(node.meta)
                self.compute(made[node])
            return made[node]

        output.args = torch.fx.map_arg(output.args, plain)


_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
#: Functions that the rewrite inserts: they have to run as they are.
_PLACING = frozenset({constrain, ones_of, replicated, update_statistics, whole, whole_copy, write_whole})
