"""What an operator on one tensor does to a spec: the algebra by which it moves to the other side of a redistribution.

    f(redistribute(x, A -> B))  =  redistribute(f'(x), A' -> B')

In: a node that reads one tensor, and what that tensor is globally (spec and shape). Out: what the result is globally, and the
arguments with which the operator gives the local tensor of that. Known are operators whose only other arguments are dims and
shapes, so that they mean the same on every rank. (A slice or a factor may be another one on each rank, where a program computes
with its own rank, and the graph does not say.)

- Elementwise operators keep the spec; where it owes a sum, only linear ones.
- Permutations rename dims.
- Views map dims to dims where they keep them, split them or merge them. A shard goes to the outermost of those that a dim is
  split into, or comes from the outermost of those that are merged, where the pieces are even.
- Reductions drop dims. Where a dropped dim is a shard, a sum owes the sum over ranks. Maxima and minima do not move there: what
  communication libraries call a maximum may lose a nan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.capture.marks import Mark
from dtensor_compile.capture.mesh import MeshLayout, parse_mesh
from dtensor_compile.capture.spec import parse_spec, spec_text
from dtensor_compile.compat.dtensor import Partial, Placement, Replicate, Shard
from dtensor_compile.lowering.expand import local_shape
from dtensor_compile.passes.alike import may_use_sizes, mark_of
from dtensor_compile.passes.nodes import Redistribution, call

aten = torch.ops.aten

_COPIES = {aten.clone.default, aten.detach.default, aten.alias.default}
_ELEMENTWISE = _COPIES | {
    op.default
    for op in (
        aten.abs, aten.cos, aten.erf, aten.exp, aten.log, aten.neg, aten.reciprocal, aten.relu, aten.rsqrt, aten.sigmoid,
        aten.silu, aten.sin, aten.sqrt, aten.tanh,
    )
}  # fmt: skip
_PERMUTATIONS = {aten.transpose.int, aten.t.default, aten.permute.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_REDUCTIONS = {aten.sum.dim_IntList: "sum", aten.sum.default: "sum", aten.amax.default: "max", aten.amin.default: "min"}


@dataclass(frozen=True)
class Global:
    """What a local tensor is globally: placements on a mesh, and a shape of plain integers."""

    placements: tuple[Placement, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, spec: str, shape: Sequence[Any]) -> Global | None:
        """None where the shape is symbolic, or shards are strided."""
        placements = parse_spec(spec)
        if not all(type(size) is int for size in shape) or not all(type(p) in (Shard, Replicate, Partial) for p in placements):
            return None
        return cls(placements, tuple(shape))

    @property
    def spec(self) -> str:
        return spec_text(self.placements)

    def shards(self, dim: int) -> list[int]:
        """The mesh dims that shard a tensor dim."""
        return [i for i, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim]

    def owed(self) -> set[str]:
        """The reductions that it owes."""
        return {p.reduce_op for p in self.placements if isinstance(p, Partial)}

    def moved(self, dims: dict[int, int], shape: Sequence[int]) -> Global | None:
        """With tensor dims renamed; None where a sharded one has no new name."""
        if any(isinstance(p, Shard) and p.dim not in dims for p in self.placements):
            return None
        return Global(tuple(Shard(dims[p.dim]) if isinstance(p, Shard) else p for p in self.placements), tuple(shape))


@dataclass(frozen=True)
class Chain:
    """Operators on one tensor behind a redistribution, and what they give where they run in front of it.

    Attributes:
        forms: what each gives on the local tensor before the redistribution; the last is what is redistributed then.
        wanted: what the last of them gives in the graph.
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
        """The operators on the local tensor before the redistribution, as new nodes in front of `before`."""
        for operator, form in zip(self.operators, self.forms):
            local = apply(operator, local, form, self.layout, self.coordinate, before)
        return local


def chain(this: Redistribution, operators: Sequence[torch.fx.Node]) -> Chain | None:
    """What becomes of operators that move in front of the redistribution that they follow; None where one of them cannot."""
    layout = parse_mesh(this.mesh)
    coordinate = layout.coordinate(dist.get_rank())
    forms: list[Global] | None = [g for spec in (this.source, this.target) if (g := Global.of(spec, this.shape))]
    if coordinate is None or len(forms) < 2:
        return None
    moved = []
    for operator in operators:
        forms = carry(operator, forms, layout, coordinate)
        if forms is None or may_round(operator, forms[0]):
            return None
        moved.append(forms[0])
    return Chain(tuple(operators), tuple(moved), forms[1], layout, coordinate)


def carry(node: torch.fx.Node, given: Sequence[Global], layout: MeshLayout, coordinate: Sequence[int]) -> list[Global] | None:
    """What the result of a node is globally, for each of several forms of its input; None where nothing says.

    Args:
        given: forms of one global tensor; the last is the one that the node reads in the graph.
        coordinate: of this rank in the mesh.
    """
    linear, mark = {"sum", "avg"} if node.target is aten.neg.default else set(), mark_of(node)
    if node.target in _VIEWS:
        shape = mark.shape if mark is not None and mark.mesh == str(layout) else _viewed_shape(node, given[-1], layout)
        made = [shape and _viewed(form, shape, layout) for form in given]
    elif node.target in _ELEMENTWISE:
        made = [form if node.target in _COPIES or form.owed() <= linear else None for form in given]
    elif node.target in _PERMUTATIONS:
        made = [_permuted(node, form) for form in given]
    elif node.target in _REDUCTIONS:
        made = [_reduced(node, form) for form in given]
    else:
        return None
    results = [form for form in made if form is not None]
    if len(results) < len(given) or len(node.all_input_nodes) != 1:
        return None
    if not may_use_sizes():
        agrees = mark == Mark(results[-1].spec, str(layout), results[-1].shape)
        return results if agrees or mark is None and node.target not in _VIEWS else None
    read = local_shape(results[-1].placements, layout, coordinate, results[-1].shape)
    return results if read == list(node.meta["val"].shape) else None


def apply(
    node: torch.fx.Node,
    local: torch.fx.Node,
    result: Global,
    layout: MeshLayout,
    coordinate: Sequence[int],
    before: torch.fx.Node,
) -> torch.fx.Node:
    """The operator of `node` on another local tensor, so that the result is the local tensor of `result`; a new node in front of
    `before`."""
    args = node.args[1:]
    if node.target in _VIEWS:
        args = (local_shape(result.placements, layout, coordinate, result.shape),)
        if not local.meta["val"].is_contiguous():
            local = call(aten.clone.default, (local,), {"memory_format": torch.contiguous_format}, like=node, before=before)
    mark = Mark(result.spec, str(layout), result.shape)
    return call(node.target, (local, *args), node.kwargs, like=node, before=before, mark=mark)


def is_reduction(node: torch.fx.Node) -> bool:
    return node.target in _REDUCTIONS


def may_round(node: torch.fx.Node, result: Global) -> bool:
    """Whether a sum is rounded to a narrow dtype on each rank before it is summed over ranks."""
    value = node.meta["val"]
    return node.target in _REDUCTIONS and bool(result.owed()) and value.is_floating_point() and value.element_size() < 4


def _permuted(node: torch.fx.Node, given: Global) -> Global | None:
    rank = len(given.shape)
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [dim % rank for dim in node.args[1]]  # type: ignore[union-attr]
    else:
        a, b = (0, 1) if node.target is aten.t.default else (dim % rank for dim in node.args[1:3])  # type: ignore[operator]
        if rank > 1:
            order[a], order[b] = order[b], order[a]
    return given.moved({old: new for new, old in enumerate(order)}, [given.shape[old] for old in order])


def _reduced(node: torch.fx.Node, given: Global) -> Global | None:
    op, rank = _REDUCTIONS[node.target], len(given.shape)  # type: ignore[index]
    listed = node.args[1] if len(node.args) > 1 else None
    dropped = {dim % rank for dim in listed} if listed else set(range(rank))  # type: ignore[union-attr, operator]
    keep = len(node.args) > 2 and bool(node.args[2])
    cut = [i for i, p in enumerate(given.placements) if isinstance(p, Shard) and p.dim in dropped]
    if node.kwargs or given.owed() - {op} or op != "sum" and (cut or given.owed()):
        return None
    names: dict[int, int] = {}
    shape: list[int] = []
    for dim, size in enumerate(given.shape):
        if dim not in dropped:
            names[dim] = len(shape)
        if dim not in dropped or keep:
            shape.append(1 if dim in dropped else size)
    owing = tuple(Partial(op) if i in cut else p for i, p in enumerate(given.placements))
    return Global(owing, given.shape).moved(names, shape)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]] | None:
    """Dims of two shapes that stand for each other: the shortest runs from the left whose sizes have equal products."""
    if math.prod(old) != math.prod(new) or 0 in (*old, *new):
        return None
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first, start = i, j
        a, i = (old[i], i + 1) if i < len(old) else (1, i)
        b, j = (new[j], j + 1) if j < len(new) else (1, j)
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        groups.append((range(first, i), range(start, j)))
    return groups


def _viewed_shape(node: torch.fx.Node, given: Global, layout: MeshLayout) -> tuple[int, ...] | None:
    """Global shape of a view of `given`: the local one, with the outermost dim of each group that is a shard made whole."""
    was, held = tuple(node.args[0].meta["val"].shape), tuple(node.meta["val"].shape)  # type: ignore[union-attr]
    if not all(type(size) is int for size in (*was, *held)):
        return None
    shape = list(held)
    for dims, made in _groups(was, held) or ():
        n = math.prod(layout.shape[m] for dim in dims for m in given.shards(dim))
        outer = next((dim for dim in made if held[dim] != 1), made[0] if made else None)
        if n > 1 and (outer is None or any(given.shape[dim] % n for dim in dims if given.shards(dim))):
            return None  # uneven shards: each rank would guess another shape
        if n > 1 and outer is not None:
            shape[outer] *= n
    return tuple(shape) if math.prod(shape) == math.prod(given.shape) else None


def _viewed(given: Global, shape: Sequence[int], layout: MeshLayout) -> Global | None:
    """`given` viewed globally as `shape`."""
    names: dict[int, int] = {}
    groups = _groups(given.shape, shape)
    for dims, made in groups or ():
        cut = [dim for dim in dims if given.shards(dim)]
        if not cut:
            continue
        n = math.prod(layout.shape[m] for m in given.shards(cut[0]))
        outer = next((dim for dim in made if shape[dim] != 1), None)
        if len(cut) > 1 or outer is None or any(given.shape[dim] != 1 for dim in dims if dim < cut[0]):
            return None
        if given.shape[cut[0]] != shape[outer] and (given.shape[cut[0]] % n or shape[outer] % n):
            return None
        names[cut[0]] = outer
    return given.moved(names, shape) if groups is not None else None
