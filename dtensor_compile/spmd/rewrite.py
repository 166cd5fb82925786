"""A Dynamo graph made to run on DTensors: inputs placed, intermediates redistributed, results made plain again.

Comes in: the graph, and the placements that the propagation found for its tensors (``spread.py``). Goes out: the same
graph over DTensors; its inputs and outputs are what they were.

What makes it right: a replicated DTensor means what the plain tensor means, DTensor's rules keep the meaning whatever
the placements are, and outputs that were plain are made whole. Gradients of plain inputs are made whole by the same
step backwards. Cutting a tensor that every rank has sends nothing; making its gradient whole sends it once, which
storing the parameter in shards (`shard_module`) saves.

- Where DTensor leaves an intermediate whole that the propagation cuts, or owing a sum, a redistribution is put behind
  it.
- The mean of a loss over targets of which some do not count is a sum over a sum, of all ranks.
- A convolution runs on shards of the batch: DTensor has a rule for that, and takes arguments as they come.
- A function that cannot run on the shards it gets runs on whole tensors, which every rank has then; a decision tells
  the bytes. What it writes to in place is cut again.
- Random numbers are those of the plain program: every rank draws them for the whole tensor. Dropout is a product with
  such numbers, and sends nothing.
- What is written in place and seen through another view stays whole (``in_place.py``).
- A checkpointed region is rewritten as the graph around it is.

    before   y = conv2d(x, w)                       x: S(0)R, w: RS(0)
    after    v = constrain(w, whole); y = conv2d(x, v)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

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
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.nodes import source_line
from dtensor_compile.ir.mesh import mesh_text
from dtensor_compile.spmd.constraint import (
    constrain,
    mean_loss,
    ones_of,
    replicated,
    update_statistics,
    whole,
    whole_copy,
    write_whole,
)
from dtensor_compile.spmd.in_place import function_name, stay_whole, written_argument
from dtensor_compile.spmd.logical_mesh import dims_in
from dtensor_compile.spmd.other_ranks import fails_on_some_rank
from dtensor_compile.spmd.partition_spec import Axes, axes_to_placements, placements_to_axes
from dtensor_compile.spmd.propagate import Sharding
from dtensor_compile.spmd.recurrent import recurrent_layer


class Rewrite:
    """Runs the graph once more, now over fake DTensors, and puts in what has to stand between its nodes."""

    def __init__(
        self, gm: torch.fx.GraphModule, mesh: DeviceMesh, wanted: dict[torch.fx.Node, Sharding], fall_back: bool
    ) -> None:
        self.gm, self.graph, self.mesh, self.wanted, self.fall_back = gm, gm.graph, mesh, wanted, fall_back
        self.decisions: list[Decision] = []
        self.mesh_shape, self.text = tuple(mesh.shape), mesh_text(mesh)
        self.values: dict[torch.fx.Node, Any] = {}
        self.stay_whole = stay_whole(self.graph)
        self.was_plain = {node for node in self.graph.nodes if not isinstance(node.meta.get("example_value"), DTensor)}

    def run(self) -> None:
        """Rewrites the graph."""
        nodes = list(self.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        with (
            tracing_mode() as mode,
            capture_redistributions(),
        ):  # torch's own steps look at this rank's part of symbolic sizes
            for node in placeholders:
                self.values[node] = fake_like(mode, node.meta["example_value"])
            for node in reversed(placeholders):  # each goes right behind the last one, so that the first comes first
                self._place_input(node, placeholders[-1])
            for node in nodes[len(placeholders) :]:
                if node.op == "output":
                    self._make_results_plain(node)
                else:
                    self._rewrite(node)

    def run_inside(self, around: Rewrite, arguments: Sequence[Any]) -> Any:
        """Rewrites the graph of a checkpointed region, and gives its results, placed as they are made.

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
        self._compute(node)
        if node not in self.stay_whole:
            self._place(node)
        elif isinstance(self.values[node], DTensor):
            self._insert(node, node, whole_copy)

    def _compute(self, node: torch.fx.Node) -> None:
        if function_name(node).startswith("conv"):
            self._cut_batch_alone(node)
        elif node.target is torch.nn.functional.batch_norm:
            self._keep_statistics(node)
        elif node.target in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
            self._count_targets(node)
        elif node.target is recurrent_layer:
            self._tell_recurrent(node)
        written = written_argument(node)
        if function_name(node) in ("setitem", "__setitem__") and self._is_cut(written):
            self._take_whole(node, "what is assigned to may be a shard of another rank")
        self._mix(node, written)
        as_it_is = node.target in _PLACING or checkpointed(node) is not None
        try:
            failed = None if as_it_is else fails_on_some_rank(self.gm, node, self.values)
            if failed is not None:
                raise failed
            value = self._run(node)
        except DrawsOnShards:
            value = self._draw_whole(node)
        except Exception as error:
            given = any(isinstance(self.values[used], DTensor) for used in node.all_input_nodes)
            if not self.fall_back or not given or as_it_is:
                raise
            self._take_whole(node, next(iter(str(error).splitlines()), type(error).__name__))
            value = run_node(self.gm, node, self.values)
        self.values[node] = value
        copy = written_argument(node)
        if written is not None and copy is not None and copy is not written:
            self._write_back(node, written, copy)
        was = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            node.meta["example_value"] = value
            if isinstance(was, DTensor) and not isinstance(value, DTensor) and node.target not in _PLACING:
                # It fell back to whole tensors, and is a DTensor to the program: over axes that are not manual, in a
                # manual region.
                self._insert(node, node, replicated, self.text, tuple(dims_in(self.mesh, was.device_mesh)))

    def _run(self, node: torch.fx.Node) -> Any:
        inside = checkpointed(node)
        if inside is not None:
            given = [self.values[x] if isinstance(x, torch.fx.Node) else x for x in node.args[1:]]
            return Rewrite(inside, self.mesh, self.wanted, self.fall_back).run_inside(self, given)
        with refusing_draws():
            return run_node(self.gm, node, self.values)

    def _mix(self, node: torch.fx.Node, written: torch.fx.Node | None) -> None:
        """Plain and DTensor arguments of one node, made fit for its backward: a plain tensor with a gradient gets that
        as a plain one. What is written to a plain tensor is plain."""
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
                self._replace_argument(node, used, whole)
        elif placed:
            for used, x in values.items():
                if not isinstance(x, DTensor) and x.requires_grad:
                    self._replace_argument(node, used, replicated, self.text)

    def _cut_batch_alone(self, node: torch.fx.Node) -> None:
        """The arguments of a convolution, cut along the batch or not at all."""
        tensors = [used for used in node.all_input_nodes if isinstance(self.values[used], torch.Tensor)]
        if not any(isinstance(self.values[used], DTensor) for used in tensors):
            return
        gathered, ndim = 0, max(self.values[used].dim() for used in tensors)
        for used in tensors:
            value = self.values[used]
            batched = used is tensors[0] and value.dim() == ndim  # else its first dim is the channels
            if not isinstance(value, DTensor):
                self._replace_argument(node, used, replicated, self.text)
                continue
            keep: list[Placement] = [p if batched and p == Shard(0) else Replicate() for p in value.placements]
            gathered += int(value.numel()) * value.element_size() if tuple(keep) != value.placements else 0
            keep = self._over_mesh(keep, dims_in(self.mesh, value.device_mesh))
            self._replace_argument(
                node, used, constrain, self.text, placements_to_axes(keep, self.mesh_shape, value.dim()), False
            )
        self._tell_gathered(node, function_name(node), gathered)

    def _tell_recurrent(self, node: torch.fx.Node) -> None:
        """A decision with the bytes that a recurrent layer takes from other shards than those of the batch."""
        gathered = 0
        for used in node.all_input_nodes:
            value = self.values[used]
            if isinstance(value, DTensor):
                batch = (0 if node.args[7] else 1) if used is node.args[1] else 1 if used in node.args[2] else None
                whole_or_batch = all(
                    p.is_replicate() or batch is not None and p == Shard(batch) for p in value.placements
                )
                gathered += 0 if whole_or_batch else int(value.numel()) * value.element_size()
        self._tell_gathered(node, str(node.args[0]), gathered)

    def _tell_gathered(self, node: torch.fx.Node, name: str, gathered: int) -> None:
        if gathered:
            why = f"{name} runs on shards of the batch, with {gathered:,} bytes of other shards gathered"
            self.decisions.append(Decision("replicate_fallback", source_line(node), why))

    def _keep_statistics(self, node: torch.fx.Node) -> None:
        """A batch norm whose running statistics are written by a call of their own: DTensor writes to shards that it
        made of them.
        """
        given = inspect.signature(torch.nn.functional.batch_norm).bind(*node.args, **node.kwargs)
        given.apply_defaults()
        x, mean, var = (given.arguments[name] for name in ("input", "running_mean", "running_var"))
        if mean is None or not given.arguments["training"] or not isinstance(self.values[x], DTensor):
            return
        with self.graph.inserting_before(node):
            update = self.graph.call_function(update_statistics, (x, mean, var, given.arguments["momentum"]))
        update.meta = {key: item for key, item in node.meta.items() if key not in ("grapharg", "example_value")}
        self._compute(update)
        given.arguments.update(running_mean=None, running_var=None)
        node.args, node.kwargs = given.args, given.kwargs

    def _count_targets(self, node: torch.fx.Node) -> None:
        """The mean of losses of class indices as their sum over that of the weights that count, where a rank has some
        of them alone.
        """
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
        given.apply_defaults()
        has = given.arguments
        of_classes = isinstance(has["target"], torch.fx.Node) and not self.values[has["target"]].is_floating_point()
        plain = has["reduction"] == "mean" and has["size_average"] is None and has["reduce"] is None
        if of_classes and plain and (self._is_cut(has["input"]) or self._is_cut(has["target"])):
            node.target, node.kwargs = mean_loss, {}
            node.args = (has["input"], has["target"], has["weight"], has["ignore_index"], has.get("label_smoothing"))

    def _take_whole(self, node: torch.fx.Node, reason: str) -> None:
        """The arguments of a node whole and plain: so it computes on every rank what the program says."""
        gathered, written = 0, written_argument(node)
        for used in node.all_input_nodes:
            value = self.values[used]
            if isinstance(value, DTensor):
                gathered += (
                    0 if all(p.is_replicate() for p in value.placements) else int(value.numel()) * value.element_size()
                )
                self._replace_argument(node, used, whole_copy if used is written else whole)
        why = f"{function_name(node)} runs on whole tensors, {gathered:,} bytes gathered: {reason}"
        self.decisions.append(Decision("replicate_fallback", source_line(node), why))

    def _replace_argument(
        self, node: torch.fx.Node, used: torch.fx.Node, function: Callable[..., Any], *args: Any
    ) -> torch.fx.Node:
        """What a function makes of an argument of a node, given to the node in place of the argument."""
        with self.graph.inserting_before(node):
            made = self.graph.call_function(function, (used, *args))
        made.meta = {key: item for key, item in used.meta.items() if key != "grapharg"}
        node.replace_input_with(used, made)
        self._compute(made)
        return made

    def _is_cut(self, node: torch.fx.Node | None) -> bool:
        value = self.values.get(node) if node is not None else None
        return isinstance(value, DTensor) and not all(p.is_replicate() for p in value.placements)

    def _write_back(self, node: torch.fx.Node, written: torch.fx.Node, copy: torch.fx.Node) -> None:
        """What a node has written to a whole copy, to the DTensor that it is a copy of."""
        with self.graph.inserting_after(node):
            back = self.graph.call_function(write_whole, (written, copy))
        back.meta = {key: item for key, item in written.meta.items() if key != "grapharg"}
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
        if written in self.was_plain:
            self.was_plain.add(back)
        self._compute(back)

    def _draw_whole(self, node: torch.fx.Node) -> Any:
        """A node that draws random numbers for a DTensor, drawing those of the whole tensor."""
        name, x = function_name(node), node.args[0] if node.args else None
        if name in _DROPOUTS and isinstance(x, torch.fx.Node) and isinstance(self.values[x], DTensor):
            return self._multiply_by_draws(node, x)
        if name.endswith("_like") and isinstance(x, torch.fx.Node):
            self._replace_argument(node, x, ones_of)
        else:
            self._take_whole(node, "random numbers are drawn for the whole tensor, as the plain program does")
        return run_node(self.gm, node, self.values)

    def _multiply_by_draws(self, node: torch.fx.Node, x: torch.fx.Node) -> Any:
        """``dropout(x)`` as ``x * dropout(ones)``: the ones are whole and plain, and cut without a collective."""
        with self.graph.inserting_before(node):
            draws = self.graph.create_node(node.op, node.target, node.args, node.kwargs)
        draws.meta = {key: item for key, item in node.meta.items() if key != "grapharg"}
        self._replace_argument(draws, x, ones_of)
        self.values[draws] = run_node(self.gm, draws, self.values)
        writes = written_argument(node) is not None
        node.op, node.target, node.args, node.kwargs = "call_method", "mul_" if writes else "mul", (x, draws), {}
        return run_node(self.gm, node, self.values)

    def _insert(
        self, behind: torch.fx.Node, like: torch.fx.Node, function: Callable[..., Any], *args: Any
    ) -> torch.fx.Node:
        """A call behind a node; it takes the place of its first argument, `like`, for all that use that."""
        with self.graph.inserting_after(behind):
            node = self.graph.call_function(function, (like, *args))
        node.meta = dict(like.meta)
        node.meta.pop("grapharg", None)
        like.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
        if like in self.was_plain:
            self.was_plain.add(node)
        self._compute(node)
        return node

    def _place_input(self, node: torch.fx.Node, last: torch.fx.Node) -> None:
        """A plain input as a DTensor, where it has a gradient or is cut. Others stay plain, and count as replicated
        where they meet a DTensor; so does what is written to, as the program was given it. The gradient of a DTensor is
        placed as the DTensor."""
        value, sharding = self.values[node], self.wanted.get(node)
        cut = sharding is not None and any(sharding.axes)
        if not isinstance(value, torch.Tensor) or not node.users or node in self.stay_whole:
            return
        if isinstance(value, DTensor):
            owes = any(p.is_partial() for p in value.placements)
            if value.requires_grad and not owes and mesh_text(value.device_mesh) == self.text:
                axes = placements_to_axes(value.placements, self.mesh_shape, value.dim())
                self._insert(last, node, constrain, self.text, axes, True)
            return
        if value.requires_grad or cut:
            made = self._insert(last, node, replicated, self.text)
            if sharding is not None and cut:
                self._insert(made, made, constrain, self.text, sharding.axes, False)

    def _place(self, node: torch.fx.Node) -> None:
        """An intermediate that is not placed as the propagation has it: not cut where it should be, or owing a sum. And
        one whose gradient will owe a sum, as it goes whole into products with what is cut: the terms are added first,
        and sent once."""
        value, sharding = self.values[node], self.wanted.get(node)
        if not isinstance(value, DTensor) or sharding is None or node.target is constrain:
            return
        here = dims_in(self.mesh, value.device_mesh)
        axes = self._other_axes(value, sharding, here)
        gradient = value.requires_grad and any(self._adds_axes(user, sharding) for user in node.users)
        if axes is None and gradient:
            axes = placements_to_axes(self._over_mesh(value.placements, here), self.mesh_shape, value.dim())
        if axes is not None:
            self._insert(node, node, constrain, self.text, axes, gradient)

    def _over_mesh(self, placements: Sequence[Placement], here: Sequence[int]) -> list[Placement]:
        """Placements over these dims of the mesh, as placements over the mesh: the other dims are manual, and nothing
        is cut there.
        """
        made: list[Placement] = [Replicate()] * len(self.mesh_shape)
        for dim, placement in zip(here, placements):
            made[dim] = placement
        return made

    def _other_axes(self, value: DTensor, sharding: Sharding, here: Sequence[int]) -> Axes | None:
        """The axes for a DTensor over these dims of the mesh that the propagation cuts by an axis that cuts none of it
        yet, or that owes a sum; None for others. Cuts that DTensor chose stay."""
        wanted, target, changes = axes_to_placements(sharding.axes, self.mesh_shape), [], False
        for have, want in zip(value.placements, [wanted[dim] for dim in here]):
            cut, wants_cut = (isinstance(p, (Shard, StridedShard)) for p in (have, want))
            changes = changes or have.is_partial() or (wants_cut and not cut)
            target.append(have if cut else want if wants_cut else Replicate())
        return placements_to_axes(self._over_mesh(target, here), self.mesh_shape, value.dim()) if changes else None

    def _adds_axes(self, user: torch.fx.Node, sharding: Sharding) -> bool:
        """Whether a product is cut along an axis that does not cut this factor of it."""
        made = self.wanted.get(user)
        have = {axis for entry in sharding.cuts for axis in entry}
        return (
            made is not None
            and function_name(user) in _PRODUCTS
            and not {axis for entry in made.cuts for axis in entry} <= have
        )

    def _make_results_plain(self, output: torch.fx.Node) -> None:
        """Results that Dynamo knows as plain tensors are plain again."""
        made: dict[torch.fx.Node, torch.fx.Node] = {}

        def plain(node: torch.fx.Node) -> torch.fx.Node:
            if not isinstance(self.values.get(node), DTensor) or node not in self.was_plain:
                return node
            if node not in made:
                with self.graph.inserting_before(output):
                    made[node] = self.graph.call_function(whole, (node,))
                made[node].meta = dict(node.meta)
                self._compute(made[node])
            return made[node]

        output.args = torch.fx.map_arg(output.args, plain)


_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
#: What the rewrite puts in: it has to run as it is.
_PLACING = frozenset({constrain, ones_of, replicated, update_statistics, whole, whole_copy, write_whole})
#: Functions of (input, p, training, inplace) that multiply by random numbers of the input's shape.
_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_", "feature_dropout"})
