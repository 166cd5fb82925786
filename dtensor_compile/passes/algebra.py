"""What operators do to specs: the algebra by which they move to the other side of a redistribution.

    f(redistribute(x, A -> B), y)  =  redistribute(f'(x, y'), A' -> B')

In: a node, and what each tensor that it reads is globally (spec and shape). Out: what its result is globally, and as
what it has to read them; y' is y cut as A is, which costs nothing where y is the same on every rank.

One table has for each operator what it does along one mesh dim; mesh dims do not know of each other:

- Elementwise operators keep shards, of all that they read. Sums and differences of what owes a sum owe that sum; so
  does a product with what is the same on every rank.
- Matrix products: rows, columns, batches stay shards; shards of the dim that is summed owe a sum, and so on for what
  owes one.
- Permutations rename dims. Views map dims to dims where they keep them, split them or merge them. A shard goes to the
  outermost of those that a dim is split into, or comes from the outermost of those that are merged, where the pieces
  are even.
- Reductions drop dims. Where a dropped dim is a shard, a sum owes the sum over ranks. Maxima and minima do not move
  there: what communication libraries call a maximum may lose a nan.
- Slices, norms, softmax and the like act on some dims and leave shards of the others alone; lookups leave shards of
  what is not looked up by, and of the indices.

Arithmetic on what owes a sum rounds each term, so that it stays where elements have fewer than four bytes.

A graph does not say whether numbers in it are the same on every rank: a program may compute with its own rank.
`has_numbers` tells where that matters; a mark of the result (``graph/global_annotations.py``) says that they are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard
from dtensor_compile.graph.global_annotations import Mark
from dtensor_compile.graph.nodes import call
from dtensor_compile.graph.rank_uniformity import COPIES
from dtensor_compile.ir.mesh import MeshLayout
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.ops.expand import local_shape

aten = torch.ops.aten
R = Replicate()

VIEWS = (aten.view.default, aten._unsafe_view.default)

_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_PERMUTATIONS = (aten.transpose.int, aten.t.default, aten.permute.default)
_REDUCTIONS = {aten.sum.dim_IntList: "sum", aten.sum.default: "sum", aten.amax.default: "max", aten.amin.default: "min"}
_MEANS = (aten.mean.dim, aten.var_mean.correction, aten.linalg_vector_norm.default)

#: Operators that act on some dims of all the tensors that they read: the place of the dims among their arguments,
#: whether they drop them, and whether they are linear.
_ACTING: dict[Any, tuple[int, bool, bool]] = {
    aten.slice.Tensor: (1, False, True),
    aten.select.int: (1, True, True),
    aten.unbind.int: (1, True, True),
    aten.split.Tensor: (2, False, True),
    aten.split_with_sizes.default: (2, False, True),
    aten.cat.default: (1, False, True),
    aten.flip.default: (1, False, True),
    aten.cumsum.default: (1, False, True),
    aten._softmax.default: (1, False, False),
    aten._log_softmax.default: (1, False, False),
    aten._softmax_backward_data.default: (2, False, False),
    aten._log_softmax_backward_data.default: (2, False, False),
}

#: Operators with numbers that say more than dims and shapes.
_BOUNDED = (
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default,
    aten.linalg_vector_norm.default,
    aten.native_layer_norm.default, aten._fused_rms_norm.default,
)  # fmt: skip
_STRUCTURAL = (*COPIES, *_CASTS)

Placements = tuple[Placement, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Global:
    """What a local tensor is globally: placements on a mesh, and a shape of plain integers."""

    placements: Placements
    shape: Shape

    @classmethod
    def of(cls, spec: str, shape: Sequence[Any]) -> Global | None:
        """None where the shape is symbolic, or shards are strided."""
        placements = parse_spec(spec)
        if not all(type(size) is int for size in shape) or not all(
            type(p) in (Shard, Replicate, Partial) for p in placements
        ):
            return None
        return cls(placements, tuple(shape))

    @property
    def spec(self) -> str:
        return spec_text(self.placements)

    def mark(self, layout: MeshLayout) -> Mark:
        return Mark(self.spec, str(layout), self.shape)

    def shards(self, dim: int) -> list[int]:
        """The mesh dims that shard a tensor dim."""
        return [i for i, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim]

    def pieces(self, dim: int, layout: MeshLayout) -> int:
        """Into how many shards a tensor dim is cut."""
        return math.prod(layout.shape[i] for i in self.shards(dim))

    def is_even(self, layout: MeshLayout) -> bool:
        return not any(size % self.pieces(dim, layout) for dim, size in enumerate(self.shape))

    def local_shape(self, layout: MeshLayout, coordinate: Sequence[int]) -> list[int]:
        return local_shape(self.placements, layout, coordinate, self.shape)


@dataclass(frozen=True)
class Form:
    """A way to run an operator: as what it reads its operands, and what its results are."""

    needs: tuple[Global, ...]
    gives: tuple[Global, ...]


#: Placements of the operands and of the results, along one mesh dim; one placement for all results, or one for each.
Strategy = tuple[Placements, Placement | Placements]


@dataclass(frozen=True)
class SpecRule:
    """Global shapes of the results of an operator, and what it may do along a mesh dim besides reading all that is
    replicated.
    """

    shapes: tuple[Shape, ...]
    strategies: tuple[Strategy, ...]


def tensors_of(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """The tensors that a node reads, in the order of its arguments; None where it reads something else of the graph."""
    found: list[torch.fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found if all(isinstance(x.meta.get("val"), torch.Tensor) for x in found) else None


def has_numbers(node: torch.fx.Node) -> bool:
    """Whether arguments of a node are numbers or bounds that may be others on another rank. (Dims and shapes of views
    may not.)
    """
    target = node.target
    elementwise = (
        isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags and target not in _STRUCTURAL
    )
    if not elementwise and target not in _BOUNDED:
        return False
    found: list[Any] = []
    tree_map(found.append, (node.args[1:], dict(node.kwargs)))
    return any(isinstance(value, (int, float, complex)) for value in found)


def form(
    node: torch.fx.Node, given: Sequence[Global], layout: MeshLayout, shapes: tuple[Shape, ...] | None = None
) -> Form | None:
    """How `node` runs on operands that are `given`; None where it cannot.

    Operands that are replicated along a mesh dim may be needed as shards there.

    Args:
        given: of the tensors that it reads, in the order of `tensors_of`.
        layout: of the mesh that all of them are on.
        shapes: global ones of the results, where they are known; a view has no other way to know them than from
            `given`, which has to be what it reads in the graph then.
    """
    found = _rule(node, given, layout, shapes)
    if found is None:
        return None
    whole: Strategy = tuple(R for _ in given), R
    needs: list[Placements] = []
    gives: list[Placements] = []
    for i, n in enumerate(layout.shape):
        have = tuple(g.placements[i] if n > 1 else R for g in given)
        chosen = next(_matching(have, (whole, *found.strategies)), None)
        if chosen is None:
            return None
        needs.append(chosen[0])
        gives.append(chosen[1] if isinstance(chosen[1], tuple) else tuple(chosen[1] for _ in found.shapes))
    return Form(
        tuple(Global(placements, g.shape) for placements, g in zip(zip(*needs), given)),
        tuple(Global(placements, shape) for placements, shape in zip(zip(*gives), found.shapes)),
    )


def _matching(have: Placements, strategies: Iterable[Strategy]) -> Iterator[Strategy]:
    """The strategies that operands placed so can follow: first those that need nothing else, then those that cut what
    is whole.
    """
    strategies = list(strategies)
    yield from (s for s in strategies if s[0] == have)
    yield from (s for s in strategies if all(a == b or a == R and isinstance(b, Shard) for a, b in zip(have, s[0])))


def run(
    node: torch.fx.Node,
    operands: Sequence[torch.fx.Node],
    results: Sequence[Global],
    layout: MeshLayout,
    coordinate: Sequence[int],
    before: torch.fx.Node,
) -> torch.fx.Node:
    """The operator of `node` on other local tensors, so that it gives the local tensors of `results`; a new node in
    front of `before`."""
    others = iter(operands)
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: next(others))
    if node.target in VIEWS:
        local = args[0]
        if not local.meta["val"].is_contiguous():
            local = call(
                aten.clone.default, (local,), {"memory_format": torch.contiguous_format}, like=node, before=before
            )
        args = (local, results[0].local_shape(layout, coordinate))
    elif node.target is aten.expand.default:
        args = (args[0], results[0].local_shape(layout, coordinate), *args[2:])
    mark = results[0].mark(layout) if isinstance(node.meta["val"], torch.Tensor) else None
    return call(node.target, args, kwargs, like=node, before=before, mark=mark)


def is_reduction(node: torch.fx.Node) -> bool:
    return node.target in _REDUCTIONS


def may_round(node: torch.fx.Node, result: Global) -> bool:
    """Whether a sum is rounded to a narrow dtype on each rank before it is summed over ranks."""
    value = node.meta["val"]
    owes = any(isinstance(p, Partial) for p in result.placements)
    return node.target in _REDUCTIONS and owes and value.is_floating_point() and value.element_size() < 4


def _rule(
    node: torch.fx.Node, given: Sequence[Global], layout: MeshLayout, shapes: tuple[Shape, ...] | None
) -> SpecRule | None:
    target = node.target
    if target is operator.getitem:
        return None  # who reads a tuple is told by `form` of what makes it
    if not isinstance(target, torch._ops.OpOverload) or not given or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    make = _RULES.get(target)
    if make is None:
        elementwise = torch.Tag.pointwise in target.tags and not target._schema.is_mutable
        make = _elementwise if elementwise else None
    if make is None:
        return None
    found = make(node, given, layout, shapes)
    if found is None or shapes is not None and found.shapes != shapes:
        return None
    return found


def _owed(given: Sequence[Global]) -> list[Partial]:
    """What operands owe."""
    return list(dict.fromkeys(p for g in given for p in g.placements if isinstance(p, Partial)))


def _sums(node: torch.fx.Node, given: Sequence[Global]) -> list[Partial]:
    """Of what operands owe, the sums that arithmetic may run on."""
    value = node.meta["val"]
    wide = value.element_size() >= 4 or not value.is_floating_point()
    return [p for p in _owed(given) if p.reduce_op in ("sum", "avg") and wide]


def _elementwise(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return None
    try:
        shape = tuple(torch.broadcast_shapes(*(g.shape for g in given)))
    except (
        RuntimeError
    ):  # of a product over a dim of which this rank has one row: Inductor writes columns times that row
        return None
    strategies: list[Strategy] = []
    for dim, size in enumerate(shape):
        theirs = [dim - len(shape) + len(g.shape) for g in given]
        if size > 1:
            needs = tuple(Shard(d) if d >= 0 and g.shape[d] == size else R for d, g in zip(theirs, given))
            strategies.append((needs, Shard(dim)))
    if node.target in COPIES:
        strategies += [((p,), p) for p in _owed(given)]
    for p in _sums(node, given):
        if node.target in _SUMS and len(given) == 2 or node.target is aten.neg.default:
            strategies.append((tuple(p for _ in given), p))
        elif node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            strategies.append(((p, *(R for _ in given[1:])), p))
            if node.target is aten.mul.Tensor and len(given) == 2:
                strategies.append(((R, p), p))
    return SpecRule((shape,), tuple(strategies))


def _cast(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule:
    return SpecRule((given[0].shape,), tuple(((Shard(d),), Shard(d)) for d in range(len(given[0].shape))))


def _product(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    """``mm``, ``bmm`` and ``addmm``: what is added, if anything, and the factors (..., m, k) and (..., k, n)."""
    *added, a, b = given
    if node.kwargs:
        return None
    batch = len(a.shape) - 2
    shape = (*a.shape[:-1], b.shape[-1])

    def with_added(needs: Placements, dim: int) -> Strategy:
        theirs = [dim - len(shape) + len(g.shape) for g in added]
        cut = [Shard(d) if d >= 0 and g.shape[d] == shape[dim] else R for d, g in zip(theirs, added)]
        return (*cut, *needs), Shard(dim)

    strategies = [with_added((Shard(d), Shard(d)), d) for d in range(batch)]
    strategies += [with_added((Shard(batch), R), batch), with_added((R, Shard(batch + 1)), batch + 1)]
    value = node.meta["val"]
    if not added and (value.element_size() >= 4 or not value.is_floating_point()):
        strategies.append(((Shard(batch + 1), Shard(batch)), Partial("sum")))
    if not added:
        strategies += [s for p in _sums(node, given) for s in (((p, R), p), ((R, p), p))]
    return SpecRule((shape,), tuple(strategies))


def _permutation(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule:
    shape = given[0].shape
    rank = len(shape)
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [dim % rank for dim in node.args[1]]  # type: ignore[union-attr]
    else:
        a, b = (0, 1) if node.target is aten.t.default else (dim % rank for dim in node.args[1:3])  # type: ignore[operator]
        if rank > 1:
            order[a], order[b] = order[b], order[a]
    renamed: list[Strategy] = [((Shard(old),), Shard(new)) for new, old in enumerate(order)]
    return SpecRule((tuple(shape[old] for old in order),), (*renamed, *(((p,), p) for p in _owed(given))))


def _reduction(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    op = _REDUCTIONS.get(node.target)  # type: ignore[call-overload]
    old = given[0].shape
    at = 2 if node.target is aten.linalg_vector_norm.default else 1
    listed = node.args[at] if len(node.args) > at else None
    dims = listed if isinstance(listed, (list, tuple)) else [] if listed is None else [listed]
    dropped = {dim % len(old) for dim in dims} if dims else set(range(len(old)))
    keepdim = node.kwargs.get("keepdim", node.args[at + 1] if len(node.args) > at + 1 else False)
    if node.kwargs.keys() - {"keepdim", "correction"}:
        return None
    keep = bool(keepdim)
    strategies: list[Strategy] = []
    shape: list[int] = []
    for dim, size in enumerate(old):
        if dim not in dropped:
            strategies.append(((Shard(dim),), Shard(len(shape))))
        elif op == "sum":
            strategies.append(((Shard(dim),), Partial("sum")))
        if dim not in dropped or keep:
            shape.append(1 if dim in dropped else size)
    if op == "sum":
        strategies += [((p,), p) for p in _owed(given) if p.reduce_op == "sum"]
    elif node.target is aten.mean.dim:
        strategies += [((p,), p) for p in _sums(node, given)]
    results = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else (node.meta["val"],)
    return SpecRule(tuple(tuple(shape) for _ in results), tuple(strategies))


def _acting(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    at, drops, linear = _ACTING[node.target]
    old = given[0].shape
    listed = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
    dims = {dim % len(old) for dim in (listed if isinstance(listed, (list, tuple)) else [listed])} if old else set()
    if any(len(g.shape) != len(old) for g in given):
        return None
    kept = [dim for dim in range(len(old)) if dim not in dims]
    names = {dim: kept.index(dim) if drops else dim for dim in kept}
    strategies: list[Strategy] = [(tuple(Shard(dim) for _ in given), Shard(new)) for dim, new in names.items()]
    if linear:
        owed = _sums(node, given) if node.target is aten.cumsum.default else _owed(given)
        strategies += [(tuple(p for _ in given), p) for p in owed]
    values = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else (node.meta["val"],)
    shapes = []
    for value in values:
        shape = [size if type(size) is int else -1 for size in value.shape]
        for dim, new in names.items():
            shape[new] = old[dim]
        shapes.append(tuple(shape))
    return SpecRule(tuple(shapes), tuple(strategies)) if all(-1 not in shape for shape in shapes) else None


def _norm(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule:
    """Norms over the last dims: a tensor, then weights that are whole."""
    old, normalized = given[0].shape, len(node.args[1])  # type: ignore[arg-type]
    lead = len(old) - normalized
    weights = tuple(R for _ in given[1:])
    statistics = (*old[:lead], *(1 for _ in range(normalized)))
    shapes = (old, *(statistics for _ in node.meta["val"][1:]))
    return SpecRule(shapes, tuple(((Shard(dim), *weights), Shard(dim)) for dim in range(lead)))


def _norm_backward(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    """Gradients of a norm: of its input a shard, of its weights, which all rows share, a sum over ranks."""
    values = node.meta["val"]
    if not all(isinstance(value, torch.Tensor) for value in values) or values[0].element_size() < 4:
        return None
    old, normalized = given[1].shape, len(node.args[2])  # type: ignore[arg-type]
    lead = len(old) - normalized
    weights = tuple(old[lead:] for _ in values[1:])
    strategies: list[Strategy] = []
    for dim in range(lead):
        needs = tuple(Shard(dim) if len(g.shape) == len(old) else R for g in given)
        strategies.append((needs, (Shard(dim), *(Partial("sum") for _ in weights))))
    return SpecRule((old, *weights), tuple(strategies))


def _lookup(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    """Rows of a table by indices: ``embedding``, ``index_select`` along a dim, ``index`` of the first dim."""
    if len(given) != 2:
        return None
    table, indices = (g.shape for g in given)
    dim = node.args[1] % len(table) if node.target is aten.index_select.default else 0  # type: ignore[operator]
    if node.target is aten.index.Tensor and len(node.args[1]) != 1:  # type: ignore[arg-type]
        return None
    if node.target is aten.index.Tensor and not _is_of_integers(node.args[1][0]):  # type: ignore[index]
        return None
    shape = (*table[:dim], *indices, *table[dim + 1 :])
    strategies: list[Strategy] = [((R, Shard(k)), Shard(dim + k)) for k in range(len(indices))]
    others = [d for d in range(len(table)) if d != dim]
    strategies += [((Shard(d), R), Shard(d if d < dim else d - 1 + len(indices))) for d in others]
    strategies += [((p, R), p) for p in _owed(given)]
    return SpecRule((shape,), tuple(strategies))


def _is_of_integers(node: Any) -> bool:
    return node.meta["val"].dtype in (torch.int64, torch.int32)


def _expansion(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule:
    old, sizes = given[0].shape, list(node.args[1])  # type: ignore[arg-type]
    new = len(sizes) - len(old)
    local = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    shape = tuple(old[d - new] if d >= new and size in (-1, local[d - new]) else size for d, size in enumerate(sizes))
    kept: list[Strategy] = [((Shard(d),), Shard(d + new)) for d in range(len(old)) if old[d] == shape[d + new]]
    return SpecRule((shape,), (*kept, *(((p,), p) for p in _owed(given))))


def _squeezed(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    """``unsqueeze`` and ``squeeze`` of dims."""
    old = given[0].shape
    listed = node.args[1]
    dims = listed if isinstance(listed, (list, tuple)) else [listed]
    if node.target is aten.unsqueeze.default:
        at = dims[0] % (len(old) + 1)
        shape = (*old[:at], 1, *old[at:])
        names = {d: d + (d >= at) for d in range(len(old))}
    else:
        gone = {d % len(old) for d in dims} if old else set()
        if any(old[d] != 1 for d in gone):
            return None  # a rank that holds one row would drop it
        kept = [d for d in range(len(old)) if d not in gone]
        shape, names = tuple(old[d] for d in kept), {d: k for k, d in enumerate(kept)}
    renamed: list[Strategy] = [((Shard(d),), Shard(k)) for d, k in names.items()]
    return SpecRule((shape,), (*renamed, *(((p,), p) for p in _owed(given))))


def _view(
    node: torch.fx.Node, given: Sequence[Global], layout: MeshLayout, shapes: tuple[Shape, ...] | None
) -> SpecRule | None:
    this = given[0]
    shape = shapes[0] if shapes is not None else _viewed_shape(node, this, layout)
    groups = _groups(this.shape, shape) if shape is not None else None
    if groups is None:
        return None
    strategies: list[Strategy] = [((p,), p) for p in _owed(given)]
    for dims, made in groups:
        cut = [dim for dim in dims if this.shards(dim)]
        outer = next((dim for dim in made if shape[dim] != 1), None)
        if len(cut) != 1 or outer is None or any(this.shape[dim] != 1 for dim in dims if dim < cut[0]):
            continue
        n = this.pieces(cut[0], layout)
        if this.shape[cut[0]] == shape[outer] or this.shape[cut[0]] % n == 0 == shape[outer] % n:
            strategies.append(((Shard(cut[0]),), Shard(outer)))
    return SpecRule((shape,), tuple(strategies))


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


def _viewed_shape(node: torch.fx.Node, given: Global, layout: MeshLayout) -> Shape | None:
    """Global shape of a view of `given`: the local one, with the outermost dim of each group that is a shard made
    whole.
    """
    was, held = tuple(node.args[0].meta["val"].shape), tuple(node.meta["val"].shape)  # type: ignore[union-attr]
    if not all(type(size) is int for size in (*was, *held)):
        return None
    shape = list(held)
    for dims, made in _groups(was, held) or ():
        n = math.prod(given.pieces(dim, layout) for dim in dims)
        outer = next((dim for dim in made if held[dim] != 1), made[0] if made else None)
        if n > 1 and (outer is None or any(given.shape[dim] % n for dim in dims if given.shards(dim))):
            return None  # uneven shards: each rank would guess another shape
        if n > 1 and outer is not None:
            shape[outer] *= n
    return tuple(shape) if math.prod(shape) == math.prod(given.shape) else None


_RULES: dict[Any, Callable[..., SpecRule | None]] = {
    **dict.fromkeys(COPIES, _elementwise),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(_PERMUTATIONS, _permutation),
    **dict.fromkeys((*_REDUCTIONS, *_MEANS), _reduction),
    **dict.fromkeys(_ACTING, _acting),
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.addmm.default), _product),
    **dict.fromkeys((aten.embedding.default, aten.index_select.default, aten.index.Tensor), _lookup),
    **dict.fromkeys((aten.native_layer_norm.default, aten._fused_rms_norm.default), _norm),
    **dict.fromkeys((aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default), _norm_backward),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims), _squeezed),
    aten.expand.default: _expansion,
}
