"""Rules of operators for specs along one mesh dim: the table of the algebra (``algebra.py``).

In: a node, and the global form of each tensor that it reads. Out: global shapes of its results, and placements of the
operands with the resulting placements of its results; None if the operator has no rule for these arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor_compile.compat.aot.random_state import draws
from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard
from dtensor_compile.graph.arguments import const_arg, list_arg, node_arg, operator_of, value_of, values_of
from dtensor_compile.graph.operator_traits import (
    CASTS,
    IDENTITIES,
    PERMUTATIONS,
    SIZED_VIEWS,
    TWO_TERM_SUMS,
    is_pointwise,
)
from dtensor_compile.ir.mesh import MeshLayout
from dtensor_compile.passes.global_tensor import Global, Placements, Shape

aten = torch.ops.aten
R = Replicate()

#: Operators that reduce some or all dims, and the kind of their reduction.
REDUCTIONS = {aten.sum.dim_IntList: "sum", aten.sum.default: "sum", aten.amax.default: "max", aten.amin.default: "min"}
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

#: Placements of the operands and of the results, along one mesh dim; one placement for all results, or one for each.
Strategy = tuple[Placements, Placement | Placements]


@dataclass(frozen=True)
class SpecRule:
    """Global shapes of the results of an operator, and its strategies along a mesh dim besides all replicated."""

    shapes: tuple[Shape, ...]
    strategies: tuple[Strategy, ...]


def rule_of(
    node: torch.fx.Node, given: Sequence[Global], layout: MeshLayout, shapes: tuple[Shape, ...] | None
) -> SpecRule | None:
    """The rule of `node` along a mesh dim; None if it has none, or gives other shapes than `shapes`.

    An item of a tuple has none: the rule of the node that makes the tuple gives its placements.

    Args:
        given, layout, shapes: as for `dtensor_compile.passes.algebra.form_of`.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not given or draws(target):
        return None
    make = _RULES.get(target)
    if make is None:
        make = _elementwise if is_pointwise(target) and not target._schema.is_mutable else None
    found = make(node, given, layout, shapes) if make is not None else None
    if found is None or shapes is not None and found.shapes != shapes:
        return None
    return found


def _dims(node: torch.fx.Node, place: int, rank: int, otherwise: Any) -> list[int]:
    """The dims among the arguments of a node at `place`, or `otherwise` if there is no such argument: one, several, or
    None.

    Args:
        rank: number of dims of the tensor; of a scalar, dims 0 and -1 name none.

    Raises:
        TypeError: they are not numbers.
    """
    found = node.args[place] if len(node.args) > place else otherwise
    listed = list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]
    dims = [dim for dim in listed if isinstance(dim, int)]
    if len(dims) < len(listed):
        raise TypeError(f"{node.name} = {node.target}{node.args} names dims that are no numbers: {listed}")
    return [dim % rank for dim in dims] if rank else []


def _partials(given: Sequence[Global]) -> list[Partial]:
    """Partial placements of operands."""
    return list(dict.fromkeys(p for g in given for p in g.placements if isinstance(p, Partial)))


def _sums(node: torch.fx.Node, given: Sequence[Global]) -> list[Partial]:
    """Partial sums of operands on which arithmetic may run."""
    value = node.meta["val"]
    wide = value.element_size() >= 4 or not value.is_floating_point()
    return [p for p in _partials(given) if p.reduce_op in ("sum", "avg") and wide]


def _elementwise(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return None
    try:
        shape = tuple(torch.broadcast_shapes(*(g.shape for g in given)))
    except (
        RuntimeError
    ):  # a matmul that contracts a dim of which this rank has one row: Inductor writes columns times that row
        return None
    strategies: list[Strategy] = []
    for dim, size in enumerate(shape):
        theirs = [dim - len(shape) + len(g.shape) for g in given]
        if size > 1:
            needs = tuple(Shard(d) if d >= 0 and g.shape[d] == size else R for d, g in zip(theirs, given))
            strategies.append((needs, Shard(dim)))
    if node.target in IDENTITIES:
        strategies += [((p,), p) for p in _partials(given)]
    for p in _sums(node, given):
        if node.target in TWO_TERM_SUMS and len(given) == 2 or node.target is aten.neg.default:
            strategies.append((tuple(p for _ in given), p))
        elif node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            strategies.append(((p, *(R for _ in given[1:])), p))
            if node.target is aten.mul.Tensor and len(given) == 2:
                strategies.append(((R, p), p))
    return SpecRule((shape,), tuple(strategies))


def _cast(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule:
    return SpecRule((given[0].shape,), tuple(((Shard(d),), Shard(d)) for d in range(len(given[0].shape))))


def _product(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    """``mm``, ``bmm`` and ``addmm``: the added tensor, if any, and the factors (..., m, k) and (..., k, n)."""
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
        order = [dim % rank for dim in list_arg(node, 1)]
    else:
        a, b = (0, 1) if node.target is aten.t.default else (const_arg(node, k, int) for k in (1, 2))
        if rank > 1:
            order[a], order[b] = order[b], order[a]
    renamed: list[Strategy] = [((Shard(old),), Shard(new)) for new, old in enumerate(order)]
    return SpecRule((tuple(shape[old] for old in order),), (*renamed, *(((p,), p) for p in _partials(given))))


def _reduction(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    op = REDUCTIONS.get(operator_of(node))
    old = given[0].shape
    at = 2 if node.target is aten.linalg_vector_norm.default else 1
    dropped = set(_dims(node, at, len(old), None)) or set(range(len(old)))
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
        strategies += [((p,), p) for p in _partials(given) if p.reduce_op == "sum"]
    elif node.target is aten.mean.dim:
        strategies += [((p,), p) for p in _sums(node, given)]
    return SpecRule(tuple(tuple(shape) for _ in values_of(node)), tuple(strategies))


def _acting(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    at, drops, linear = _ACTING[node.target]
    old = given[0].shape
    dims = set(_dims(node, at, len(old), node.kwargs.get("dim", 0)))
    if any(len(g.shape) != len(old) for g in given):
        return None
    kept = [dim for dim in range(len(old)) if dim not in dims]
    names = {dim: kept.index(dim) if drops else dim for dim in kept}
    strategies: list[Strategy] = [(tuple(Shard(dim) for _ in given), Shard(new)) for dim, new in names.items()]
    if linear:
        partials = _sums(node, given) if node.target is aten.cumsum.default else _partials(given)
        strategies += [(tuple(p for _ in given), p) for p in partials]
    shapes = []
    for value in values_of(node):
        shape = [size if type(size) is int else -1 for size in value.shape]
        for dim, new in names.items():
            shape[new] = old[dim]
        shapes.append(tuple(shape))
    return SpecRule(tuple(shapes), tuple(strategies)) if all(-1 not in shape for shape in shapes) else None


def _norm(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule:
    """Norms over the last dims: a tensor, then replicated weights."""
    old, normalized = given[0].shape, len(list_arg(node, 1))
    lead = len(old) - normalized
    weights = tuple(R for _ in given[1:])
    statistics = (*old[:lead], *(1 for _ in range(normalized)))
    shapes = (old, *(statistics for _ in node.meta["val"][1:]))
    return SpecRule(shapes, tuple(((Shard(dim), *weights), Shard(dim)) for dim in range(lead)))


def _norm_backward(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    """Gradients of a norm: a shard for its input, a partial sum for its weights, which all rows share."""
    values = node.meta["val"]
    if not all(isinstance(value, torch.Tensor) for value in values) or values[0].element_size() < 4:
        return None
    old, normalized = given[1].shape, len(list_arg(node, 2))
    lead = len(old) - normalized
    weights = tuple(old[lead:] for _ in values[1:])
    strategies: list[Strategy] = []
    for dim in range(lead):
        needs = tuple(Shard(dim) if len(g.shape) == len(old) else R for g in given)
        strategies.append((needs, (Shard(dim), *(Partial("sum") for _ in weights))))
    return SpecRule((old, *weights), tuple(strategies))


def _lookup(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    """Rows of a table by indices: ``embedding``, ``index_select`` along a dim, ``index`` of the first dim."""
    if len(given) != 2 or not given[0].shape:
        return None
    table, indices = (g.shape for g in given)
    dim = const_arg(node, 1, int) % len(table) if node.target is aten.index_select.default else 0
    if node.target is aten.index.Tensor:
        indexed = list_arg(node, 1)
        if len(indexed) != 1 or value_of(indexed[0]).dtype not in (torch.int64, torch.int32):
            return None
    shape = (*table[:dim], *indices, *table[dim + 1 :])
    strategies: list[Strategy] = [((R, Shard(k)), Shard(dim + k)) for k in range(len(indices))]
    others = [d for d in range(len(table)) if d != dim]
    strategies += [((Shard(d), R), Shard(d if d < dim else d - 1 + len(indices))) for d in others]
    strategies += [((p, R), p) for p in _partials(given)]
    return SpecRule((shape,), tuple(strategies))


def _expansion(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule:
    old, sizes = given[0].shape, list_arg(node, 1)
    new = len(sizes) - len(old)
    local = value_of(node_arg(node, 0)).shape
    shape = tuple(old[d - new] if d >= new and size in (-1, local[d - new]) else size for d, size in enumerate(sizes))
    kept: list[Strategy] = [((Shard(d),), Shard(d + new)) for d in range(len(old)) if old[d] == shape[d + new]]
    return SpecRule((shape,), (*kept, *(((p,), p) for p in _partials(given))))


def _squeezed(node: torch.fx.Node, given: Sequence[Global], *_: Any) -> SpecRule | None:
    """``unsqueeze`` and ``squeeze`` of dims."""
    old = given[0].shape
    if node.target is aten.unsqueeze.default:
        (at,) = _dims(node, 1, len(old) + 1, None)
        shape = (*old[:at], 1, *old[at:])
        names = {d: d + (d >= at) for d in range(len(old))}
    else:
        gone = set(_dims(node, 1, len(old), None))
        if any(old[d] != 1 for d in gone):
            return None  # a rank that holds one row would drop it
        kept = [d for d in range(len(old)) if d not in gone]
        shape, names = tuple(old[d] for d in kept), {d: k for k, d in enumerate(kept)}
    renamed: list[Strategy] = [((Shard(d),), Shard(k)) for d, k in names.items()]
    return SpecRule((shape,), (*renamed, *(((p,), p) for p in _partials(given))))


def _view(
    node: torch.fx.Node, given: Sequence[Global], layout: MeshLayout, shapes: tuple[Shape, ...] | None
) -> SpecRule | None:
    this = given[0]
    shape = shapes[0] if shapes is not None else _viewed_shape(node, this, layout)
    groups = _groups(this.shape, shape) if shape is not None else None
    if shape is None or groups is None:
        return None
    strategies: list[Strategy] = [((p,), p) for p in _partials(given)]
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
    """Corresponding dims of two shapes: the shortest runs from the left whose sizes have equal products."""
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
    """Global shape of a view of `given`: the local one, with the outermost dim of each sharded group at its global
    size.
    """
    was, held = tuple(value_of(node_arg(node, 0)).shape), tuple(value_of(node).shape)
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
    **dict.fromkeys(IDENTITIES, _elementwise),
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys(SIZED_VIEWS, _view),
    **dict.fromkeys(PERMUTATIONS, _permutation),
    **dict.fromkeys((*REDUCTIONS, *_MEANS), _reduction),
    **dict.fromkeys(_ACTING, _acting),
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.addmm.default), _product),
    **dict.fromkeys((aten.embedding.default, aten.index_select.default, aten.index.Tensor), _lookup),
    **dict.fromkeys((aten.native_layer_norm.default, aten._fused_rms_norm.default), _norm),
    **dict.fromkeys((aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default), _norm_backward),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims), _squeezed),
    aten.expand.default: _expansion,
}
