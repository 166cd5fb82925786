"""Annotations in a Dynamo graph, before autograd: plain tensors become DTensors, and placements spread from those that are marked.

Comes in: a Dynamo graph whose plain tensors are equal on all ranks, some of its inputs marked (`annotate.mark_sharding`), calls of
`constraint.constrain` in it. Goes out: the same graph over DTensors; its inputs and outputs are what they were.

    before   h = linear(x, w1); c = constrain(h, mesh, ((0,), (1,)), False); return sum(h)
    after    X = replicated(x).redistribute(S(0)R); W1 = replicated(w1).redistribute(R S(0))
             h = linear(X, W1); c = constrain(h, ...); return whole(sum(c))

What makes it right: a replicated DTensor means what the plain tensor means, DTensor's rules keep the meaning whatever the placements
are, and outputs that were plain are made whole. Gradients of plain inputs are made whole by the same step backwards. Cutting a tensor
that every rank has sends nothing; making its gradient whole sends it once, which storing the parameter in shards (`shard_module`) saves.

Where DTensor leaves an intermediate whole that the propagation cuts, or owing a sum, a redistribution is put behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dtensor_compile.capture.mesh import mesh_text
from dtensor_compile.capture.spec import spec_text
from dtensor_compile.compat.dtensor import StridedShard
from dtensor_compile.compat.record import Operator, Program, fake_like, fake_mode, global_fake, recording_operators, run_node, tracing_mode
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import MeshError, PlacementError
from dtensor_compile.passes.nodes import source_line
from dtensor_compile.spmd.annotate import guard_marks, mark_of
from dtensor_compile.spmd.constraint import agree, constrain, replicated, whole
from dtensor_compile.spmd.factor_cache import FactorCache
from dtensor_compile.spmd.manual import placed_from_manual, to_manual
from dtensor_compile.spmd.mesh import device_mesh_of
from dtensor_compile.spmd.partition_spec import Axes, axes_to_placements, placements_to_axes
from dtensor_compile.spmd.propagate import Mark, Sharding, propagate
from dtensor_compile.spmd.regions import enter_regions


def spread_annotations(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], decided: Callable[[list[Decision]], None], fallback: str = "replicate"
) -> None:
    """Rewrites a Dynamo graph with annotations in place; leaves others alone.

    Args:
        fallback: a function that cannot run on DTensors placed as they are runs on whole tensors (``"replicate"``, with a decision
            that tells the cost), or its error is raised (``"error"``).

    Raises:
        MeshError: the annotations speak of more than one mesh.
        PlacementError: the program works on local tensors outside of manual regions.
        ManualRegionError: a tensor leaves a manual region unclosed, or enters one that it does not fit.
    """
    guard_marks(gm, example_inputs)
    mesh = _mesh_of(gm, example_inputs)
    if mesh is None:
        return
    for node in gm.graph.find_nodes(op="call_function", target=constrain):
        _constrain_from_here_on(node)
    enter_regions(gm.graph)
    wanted, made = _propagated(gm, example_inputs, mesh)
    decided(made)
    rewrite = _Rewrite(gm, mesh, wanted, fallback == "replicate")
    rewrite.run()
    decided(rewrite.decisions)
    gm.graph.lint()
    gm.recompile()


def _mesh_of(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> DeviceMesh | None:
    """The mesh of the annotations of a graph; None where it has none."""
    calls = [node for target in (constrain, to_manual) for node in gm.graph.find_nodes(op="call_function", target=target)]
    meshes = {str(node.args[1]) for node in calls}
    meshes |= {note.mesh.text for note in map(mark_of, example_inputs) if note is not None}
    if len(meshes) > 1:
        raise MeshError(f"the annotations of one program speak of several meshes: {', '.join(sorted(meshes))}; use one")
    return device_mesh_of(meshes.pop()) if meshes else None


def _constrain_from_here_on(node: torch.fx.Node) -> None:
    """Whoever uses the tensor behind the constraint uses the constrained one: marking is in place."""
    later = False
    for user in list(node.graph.nodes):
        if later:
            user.replace_input_with(node.args[0], node)
        later = later or user is node


# ---- which placements ----------------------------------------------------------------------------------------------------------


def _propagated(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], mesh: DeviceMesh
) -> tuple[dict[torch.fx.Node, Sharding], list[Decision]]:
    """The sharding of each tensor node, and what was decided of inputs that are not marked."""
    run = _GlobalRun(gm, tuple(mesh.shape))
    try:
        shardings = run.propagate(example_inputs, FactorCache(mesh))
    except NotGlobal as reason:
        raise PlacementError(
            f"{reason}, and the program has annotations, which speak of global tensors ({reason.where}): use "
            "enable_manual_sharding and disable_manual_sharding around what works on local tensors"
        ) from None
    except Exception as error:  # noqa: BLE001 - without the propagation the program is as right, and the reason is reported
        run.nodes.clear()
        return {}, [Decision("spread_annotations", "", f"nothing is spread: {type(error).__name__}: {error}")]
    found = {node: shardings[id(fake)] for node, fake in run.nodes.items() if id(fake) in shardings}
    decisions = []
    unmarked = {node for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs) if mark_of(value) is None}
    for node, sharding in found.items():
        if node in unmarked and any(sharding.axes) and not isinstance(node.meta["example_value"], DTensor):
            after = spec_text(axes_to_placements(sharding.axes, tuple(mesh.shape)))
            name = str(node.target).removeprefix("l_").strip("_")
            decisions.append(Decision("spread_annotations", "", f"{name} follows from the marks", "R" * mesh.ndim, after))
    return found, decisions


class NotGlobal(Exception):
    """A node speaks of local tensors or of meshes: the program has no meaning on tensors of global shape."""

    def __init__(self, node: torch.fx.Node) -> None:
        super().__init__(f"{node.target} stands for one rank's part of a tensor")
        self.where = source_line(node)


class _GlobalRun(torch.fx.Interpreter):
    """Runs a Dynamo graph on plain fake tensors of global shape and keeps what each node gives."""

    _LOCAL = frozenset({"to_local", "from_local", "full_tensor", "distribute_tensor"})

    def __init__(self, gm: torch.fx.GraphModule, mesh_shape: tuple[int, ...]) -> None:
        super().__init__(gm)
        self.mesh_shape = mesh_shape
        self.nodes: dict[torch.fx.Node, torch.Tensor] = {}
        self.marks: list[tuple[torch.Tensor, Mark]] = []
        self.program = Program()

    def propagate(self, example_inputs: Sequence[Any], factors: FactorCache) -> dict[int, Sharding]:
        mode = fake_mode()
        placeholders = self.module.graph.find_nodes(op="placeholder")  # type: ignore[union-attr]
        fakes = []
        for node, value in zip(placeholders, example_inputs):
            fake = global_fake(mode, value)
            note = mark_of(value)
            if isinstance(value, DTensor):
                whole_or_cut = [Replicate() if p.is_partial() else p for p in value.placements]
                self.marks.append((fake, Mark(placements_to_axes(whole_or_cut, self.mesh_shape, value.dim()))))
            elif note is not None:
                self.marks.append((fake, note.mark))
            fakes.append(fake)
        with recording_operators(mode) as self.program:
            self.run(*fakes)
        return propagate(self.program, self.marks, self.mesh_shape, factors)

    def run_node(self, n: torch.fx.Node) -> Any:
        name = _name(n).removeprefix("prim_")  # as Dynamo writes methods of DTensors
        if n.op in ("call_function", "call_method") and name in self._LOCAL:
            raise NotGlobal(n)
        if name == "redistribute" and isinstance(n.args[0], torch.fx.Node):
            x = self.env[n.args[0]]
            value = x.new_empty(x.shape)  # the program places it: nothing is carried over
        else:
            value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.nodes[n] = value
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is constrain:
            x, _, axes, _ = args
            self.marks.append((x, Mark(axes)))
            return x
        if target is agree:
            self.program.operators.append(Operator(agree, args, {}, args))
            return args
        if target in (to_manual, placed_from_manual):
            return self._border(target is to_manual, *args)
        return super().call_function(target, args, kwargs)

    def _border(self, enters: bool, x: torch.Tensor, _: str, axes: Axes, manual: tuple[int, ...]) -> torch.Tensor:
        """A tensor on the other side of the border of a manual region: of another shape, and nothing is carried over."""
        pieces = [math.prod(self.mesh_shape[a] for a in entry if a in manual) for entry in axes]
        other = x.new_empty([size // n if enters else size * n for size, n in zip(x.shape, pieces)])
        self.marks.append((x if enters else other, Mark(axes)))
        return other


# ---- the graph over DTensors ---------------------------------------------------------------------------------------------------


class _Rewrite:
    """Runs the graph once more, now over fake DTensors, and puts in what has to stand between its nodes."""

    def __init__(self, gm: torch.fx.GraphModule, mesh: DeviceMesh, wanted: dict[torch.fx.Node, Sharding], fall_back: bool) -> None:
        self.gm, self.graph, self.wanted, self.fall_back = gm, gm.graph, wanted, fall_back
        self.decisions: list[Decision] = []
        self.mesh_shape, self.text = tuple(mesh.shape), mesh_text(mesh)
        self.values: dict[torch.fx.Node, Any] = {}
        self.was_plain = {node for node in self.graph.nodes if not isinstance(node.meta.get("example_value"), DTensor)}

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        with tracing_mode() as mode:
            for node in placeholders:
                self.values[node] = fake_like(mode, node.meta["example_value"])
            for node in reversed(placeholders):  # each goes right behind the last one, so that the first comes first
                self._place_input(node, placeholders[-1])
            for node in nodes[len(placeholders) :]:
                if node.op == "output":
                    self._make_results_plain(node)
                else:
                    self._compute(node)
                    self._place(node)

    def _compute(self, node: torch.fx.Node) -> None:
        try:
            if _name(node).startswith("conv") and any(isinstance(self.values[used], DTensor) for used in node.all_input_nodes):
                raise NotImplementedError("DTensor's rule for the backward of a convolution asserts")
            value = run_node(self.gm, node, self.values)
        except Exception as error:
            if not self.fall_back or not any(isinstance(self.values[used], DTensor) for used in node.all_input_nodes):
                raise
            self._take_whole(node, error)
            value = run_node(self.gm, node, self.values)
        self.values[node] = value
        if isinstance(value, torch.Tensor):
            node.meta["example_value"] = value

    def _take_whole(self, node: torch.fx.Node, error: Exception) -> None:
        """The arguments of a node whole and plain: so it computes on every rank what the program says."""
        gathered = 0
        for used in node.all_input_nodes:
            value = self.values[used]
            if isinstance(value, DTensor):
                gathered += 0 if all(p.is_replicate() for p in value.placements) else int(value.numel()) * value.element_size()
                with self.graph.inserting_before(node):
                    plain = self.graph.call_function(whole, (used,))
                plain.meta = {key: item for key, item in used.meta.items() if key != "grapharg"}
                node.replace_input_with(used, plain)
                self._compute(plain)
        why = f"{_name(node)} runs on whole tensors, {gathered:,} bytes gathered: {str(error).splitlines()[0]}"
        self.decisions.append(Decision("replicate_fallback", source_line(node), why))

    def _insert(self, behind: torch.fx.Node, like: torch.fx.Node, function: Callable[..., Any], *args: Any) -> torch.fx.Node:
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
        """A plain input as a DTensor, where it has a gradient or is cut. Others stay plain, and count as replicated where they meet
        a DTensor; so does what is written to, as the program was given it. The gradient of a DTensor is placed as the DTensor."""
        value, sharding = self.values[node], self.wanted.get(node)
        cut = sharding is not None and any(sharding.axes)
        if not isinstance(value, torch.Tensor) or not node.users or _is_written(node):
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
        """An intermediate that is not placed as the propagation has it: not cut where it should be, or owing a sum. And one whose
        gradient will owe a sum, as it goes whole into products with what is cut: the terms are added first, and sent once."""
        value, sharding = self.values[node], self.wanted.get(node)
        if not isinstance(value, DTensor) or sharding is None or node.target is constrain:
            return
        axes = _other_axes(value, sharding, self.mesh_shape)
        gradient = value.requires_grad and any(self._adds_axes(user, sharding) for user in node.users)
        if axes is not None or gradient:
            here = axes if axes is not None else placements_to_axes(value.placements, self.mesh_shape, value.dim())
            self._insert(node, node, constrain, self.text, here, gradient)

    def _adds_axes(self, user: torch.fx.Node, sharding: Sharding) -> bool:
        """Whether a product is cut along an axis that does not cut this factor of it."""
        made = self.wanted.get(user)
        have = {axis for entry in sharding.cuts for axis in entry}
        return made is not None and _name(user) in _PRODUCTS and not {axis for entry in made.cuts for axis in entry} <= have

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


def _name(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_written(node: torch.fx.Node) -> bool:
    """Whether an input is written to in place."""
    in_place = [user for user in node.users if _name(user).endswith("_") and not _name(user).endswith("__")]
    return any(bool(user.args) and user.args[0] is node for user in in_place)


def _other_axes(value: DTensor, sharding: Sharding, mesh_shape: tuple[int, ...]) -> Axes | None:
    """The axes for a DTensor that the propagation cuts by an axis that cuts none of it yet, or that owes a sum; None for others.

    Cuts that DTensor chose stay.
    """
    target: list[Placement] = []
    changes = False
    for have, want in zip(value.placements, axes_to_placements(sharding.axes, mesh_shape)):
        cut, wants_cut = (isinstance(p, (Shard, StridedShard)) for p in (have, want))
        changes = changes or have.is_partial() or (wants_cut and not cut)
        target.append(have if cut else want if wants_cut else Replicate())
    return placements_to_axes(target, mesh_shape, value.dim()) if changes else None
