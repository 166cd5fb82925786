"""Chains of unary operators behind a redistribution, and their form in front of it.

    f(redistribute(x, A -> B))  =  redistribute(f'(x), A' -> B')

Correct by the algebra of ``algebra.py``, for operators that mean the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dtensor_compile.graph.nodes import RedistributeNode
from dtensor_compile.graph.operator_traits import SIZED_VIEWS
from dtensor_compile.graph.rank_uniformity import mark_of, may_use_sizes
from dtensor_compile.ir.mesh import MeshLayout, parse_mesh
from dtensor_compile.passes.algebra import form_of, has_numbers, may_round, run_on_locals, tensors_of
from dtensor_compile.passes.global_tensor import Global


@dataclass(frozen=True)
class Chain:
    """Unary operators behind a redistribution, and their results if they run in front of it.

    Attributes:
        forms: global form of the result of each on the local tensor before the redistribution; the last is
            redistributed.
        wanted: global form of the result of the last in the graph.
    """

    operators: tuple[torch.fx.Node, ...]
    forms: tuple[Global, ...]
    wanted: Global
    layout: MeshLayout
    coordinate: Sequence[int]

    @property
    def held(self) -> Global:
        return self.forms[-1]

    def apply(self, local: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
        """Runs the operators on the local tensor before the redistribution, as new nodes in front of `before`."""
        for operator, made in zip(self.operators, self.forms):
            local = run_on_locals(operator, [local], [made], self.layout, self.coordinate, before)
        return local


def chain(this: RedistributeNode, operators: Sequence[torch.fx.Node]) -> Chain | None:
    """The unary operators moved in front of the redistribution that they follow; None if one of them cannot move."""
    layout = parse_mesh(this.mesh)
    coordinate = layout.coordinate(dist.get_rank())
    forms = [g for spec in (this.source, this.target) if (g := Global.of(spec, this.shape))]
    if coordinate is None or len(forms) < 2:
        return None
    moved = []
    for operator in operators:
        found = forms_behind(operator, forms, layout, coordinate)
        if found is None or may_round(operator, found[0]):
            return None
        forms = found
        moved.append(forms[0])
    return Chain(tuple(operators), tuple(moved), forms[1], layout, coordinate)


def forms_behind(
    node: torch.fx.Node, given: Sequence[Global], layout: MeshLayout, coordinate: Sequence[int]
) -> list[Global] | None:
    """The global form of a node's result for each of several forms of its input; None if unknown.

    Args:
        given: forms of one global tensor; the last is the one that the node reads in the graph.
        coordinate: coordinate of this rank in the mesh.
    """
    mark, value = mark_of(node), node.meta.get("val")
    operands = tensors_of(node)
    if (
        operands is None
        or len(operands) != 1
        or not isinstance(value, torch.Tensor)
        or has_numbers(node)
        and mark is None
    ):
        return None
    shapes = (mark.shape,) if mark is not None and mark.mesh == str(layout) else None
    read = form_of(node, given[-1:], layout, shapes)
    if read is None:
        return None
    result = read.gives[0]
    if may_use_sizes() and result.local_shape(layout, coordinate) != list(value.shape):
        return None
    if (mark is None and not may_use_sizes() and node.target in SIZED_VIEWS) or mark not in (None, result.mark(layout)):
        return None
    forms = [form_of(node, (other,), layout, (result.shape,)) for other in given[:-1]]
    if any(made is None for made in forms):
        return None
    return [*(made.gives[0] for made in forms if made is not None), result]
