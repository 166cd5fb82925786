"""Annotations in a Dynamo graph, before autograd: plain tensors become DTensors, and placements spread from marked
ones.

Input: a Dynamo graph whose plain tensors are equal on all ranks, some of them marked inputs (`annotate.mark_sharding`),
with calls of `constraint.constrain`. Output: the same graph over DTensors, with the inputs and outputs of the original.

    before   h = linear(x, w1); c = constrain(h, mesh, ((0,), (1,)), False); return sum(h)
    after    X = replicated(x).redistribute(S(0)R); W1 = replicated(w1).redistribute(R S(0))
             h = linear(X, W1); c = constrain(h, ...); return whole(sum(c))

This module finds the placements; ``rewrite.py`` rewrites the graph and argues its correctness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dtensor_compile.compat.dtensor.record import (
    Operator,
    RecordedProgram,
    fake_mode,
    global_fake,
    graphs_in,
    recording_operators,
    tag_activation_checkpoint,
)
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import MeshError, PlacementError
from dtensor_compile.graph.nodes import source_line
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.spmd.annotate import guard_marks, mark_of, plain_tensors_are_as_outside
from dtensor_compile.spmd.constraint import agree, constrain
from dtensor_compile.spmd.factor_cache import FactorCache
from dtensor_compile.spmd.in_place import function_name
from dtensor_compile.spmd.logical_mesh import device_mesh_of
from dtensor_compile.spmd.manual import placed_from_manual, to_manual
from dtensor_compile.spmd.partition_spec import Axes, axes_to_placements, placements_to_axes
from dtensor_compile.spmd.propagate import Sharding, SpreadMark, propagate
from dtensor_compile.spmd.regions import enter_regions
from dtensor_compile.spmd.rewrite import Rewrite


def spread_annotations(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    decided: Callable[[list[Decision]], None],
    fallback: str = "replicate",
) -> None:
    """Rewrites a Dynamo graph with annotations in place; leaves others unchanged.

    Args:
        fallback: a function that cannot run on DTensors with their placements runs on full tensors (``"replicate"``,
            with a decision that reports the cost), or its error is raised (``"error"``).

    Raises:
        MeshError: the annotations are on more than one mesh.
        PlacementError: the program works on local tensors outside of manual regions.
        ManualRegionError: a tensor leaves a manual region unclosed, or enters one that it does not fit.
    """
    guard_marks(gm, example_inputs)
    mesh = _mesh_of(gm, example_inputs)
    if mesh is None:
        plain_tensors_are_as_outside()
        return
    for part in graphs_in(gm):
        for node in part.graph.find_nodes(op="call_function", target=constrain):
            _constrain_from_here_on(node)
    enter_regions(gm)
    wanted, made = _propagated(gm, example_inputs, mesh)
    decided(made)
    rewrite = Rewrite(gm, mesh, wanted, fallback == "replicate")
    rewrite.run()
    decided(rewrite.decisions)
    for part in graphs_in(gm):
        part.graph.lint()
        part.recompile()


def _mesh_of(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> DeviceMesh | None:
    """The mesh of the annotations of a graph; None if it has none."""
    meshes = {
        str(node.args[1])
        for part in graphs_in(gm)
        for target in (constrain, to_manual)
        for node in part.graph.find_nodes(op="call_function", target=target)
    }
    meshes |= {note.mesh.text for note in map(mark_of, example_inputs) if note is not None}
    if len(meshes) > 1:
        raise MeshError(f"the annotations of a program are on several meshes: {', '.join(sorted(meshes))}; use one")
    return device_mesh_of(meshes.pop()) if meshes else None


def _constrain_from_here_on(node: torch.fx.Node) -> None:
    """Replaces later uses of the tensor by the constrained one, since marking is in place."""
    later = False
    for user in list(node.graph.nodes):
        if later:
            user.replace_input_with(node.args[0], node)
        later = later or user is node


# ---- which placements ----------------------------------------------------------------------------------------------


def _propagated(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], mesh: DeviceMesh
) -> tuple[dict[torch.fx.Node, Sharding], list[Decision]]:
    """The sharding of each tensor node, and decisions about inputs that are not marked."""
    run = _GlobalRun(gm, tuple(mesh.shape))
    try:
        shardings = run.propagate(example_inputs, FactorCache(mesh))
    except NotGlobal as reason:
        raise PlacementError(
            f"{reason}, and the program has annotations, which apply to global tensors ({reason.where}): use "
            "enable_manual_sharding and disable_manual_sharding around code for local tensors"
        ) from None
    except Exception as error:  # noqa: BLE001 - without the propagation the program is as right, and the reason is reported
        run.nodes.clear()
        return {}, [
            Decision("spread_annotations", "", f"no propagation: {type(error).__name__}: {error}", left_alone=True)
        ]
    found = {node: shardings[id(fake)] for node, fake in run.nodes.items() if id(fake) in shardings}
    decisions = []
    unmarked = {
        node for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs) if mark_of(value) is None
    }
    for node, sharding in found.items():
        if node in unmarked and any(sharding.axes) and not isinstance(node.meta["example_value"], DTensor):
            after = spec_text(axes_to_placements(sharding.axes, tuple(mesh.shape)))
            name = str(node.target).removeprefix("l_").strip("_")
            decisions.append(
                Decision("spread_annotations", "", f"{name} follows from the marks", "R" * mesh.ndim, after)
            )
    return found, decisions


class NotGlobal(Exception):
    """A node uses local tensors or meshes: the program has no meaning on tensors of global shape."""

    def __init__(self, node: torch.fx.Node) -> None:
        super().__init__(f"{node.target} works on one rank's part of a tensor")
        self.where = source_line(node)


class _GlobalRun(torch.fx.Interpreter):
    """Runs a Dynamo graph on plain fake tensors of global shape and keeps the value of each node."""

    _LOCAL = frozenset({"to_local", "from_local", "full_tensor", "distribute_tensor"})

    def __init__(self, gm: torch.fx.GraphModule, mesh_shape: tuple[int, ...]) -> None:
        super().__init__(gm)
        self.mesh_shape = mesh_shape
        self.nodes: dict[torch.fx.Node, torch.Tensor] = {}
        self.marks: list[tuple[torch.Tensor, SpreadMark]] = []
        self.program = RecordedProgram()

    def propagate(self, example_inputs: Sequence[Any], factors: FactorCache) -> dict[int, Sharding]:
        mode = fake_mode()
        placeholders = self.graph.find_nodes(op="placeholder")
        fakes = []
        for _, value in zip(placeholders, example_inputs):
            fake = global_fake(mode, value)
            note = mark_of(value)
            if isinstance(value, DTensor):
                whole_or_cut = [Replicate() if p.is_partial() else p for p in value.placements]
                self.marks.append((fake, SpreadMark(placements_to_axes(whole_or_cut, self.mesh_shape, value.dim()))))
            elif note is not None:
                self.marks.append((fake, note.mark))
            fakes.append(fake)
        with recording_operators(mode) as self.program:
            self.run(*fakes)
        return propagate(self.program, self.marks, self.mesh_shape, factors)

    def run_node(self, n: torch.fx.Node) -> Any:
        name = function_name(n).removeprefix("prim_")  # prefix of methods of DTensors in Dynamo
        if n.op in ("call_function", "call_method") and name in self._LOCAL:
            raise NotGlobal(n)
        if name == "redistribute" and isinstance(n.args[0], torch.fx.Node):
            x = self.env[n.args[0]]
            value = x.new_empty(x.shape)  # the program sets its placements: nothing is propagated
        else:
            value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.nodes[n] = value
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is constrain:
            x, _, axes, _ = args
            self.marks.append((x, SpreadMark(axes)))
            return x
        if target is agree:
            self.program.operators.append(Operator(agree, args, {}, args))
            return args
        if target is tag_activation_checkpoint:  # its body is part of the program, operator by operator
            inside = _GlobalRun(args[0], self.mesh_shape)
            inside.nodes, inside.marks, inside.program = self.nodes, self.marks, self.program
            return inside.run(*args[1:])
        if target in (to_manual, placed_from_manual):
            return self._border(target is to_manual, *args)
        return super().call_function(target, args, kwargs)

    def _border(self, enters: bool, x: torch.Tensor, _: str, axes: Axes, manual: tuple[int, ...]) -> torch.Tensor:
        """A tensor on the other side of the border of a manual region: its shape differs, and nothing is propagated."""
        pieces = [math.prod(self.mesh_shape[a] for a in entry if a in manual) for entry in axes]
        other = x.new_empty([size // n if enters else size * n for size, n in zip(x.shape, pieces)])
        if not enters or all(x is not marked for marked, _ in self.marks):  # the user's mark has precedence
            self.marks.append((x if enters else other, SpreadMark(axes)))
        return other
