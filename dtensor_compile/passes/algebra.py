"""What operators do to specs: the algebra by which they move to the other side of a redistribution.

    f(redistribute(x, A -> B), y)  =  redistribute(f'(x, y'), A' -> B')

In: a node, and what each tensor that it reads is globally (spec and shape). Out: what its result is globally, and as
what it has to read them; y' is y cut as A is, which costs nothing where y is the same on every rank.

One table (``spec_rules.py``) has for each operator what it does along one mesh dim; mesh dims do not know of each
other:

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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg

from dtensor_compile.compat.dtensor.specs import Partial, Shard
from dtensor_compile.compat.pytree import tree_map
from dtensor_compile.graph.arguments import function_of, value_of
from dtensor_compile.graph.nodes import call
from dtensor_compile.graph.operator_traits import CASTS, IDENTITIES, SIZED_VIEWS, is_pointwise
from dtensor_compile.ir.mesh import MeshLayout
from dtensor_compile.passes.global_tensor import Global, Placements, Shape
from dtensor_compile.passes.spec_rules import REDUCTIONS, R, Strategy, rule_of

aten = torch.ops.aten

#: Operators with numbers that say more than dims and shapes.
_BOUNDED = (
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default,
    aten.linalg_vector_norm.default,
    aten.native_layer_norm.default, aten._fused_rms_norm.default,
)  # fmt: skip

#: Elementwise operators whose other arguments are no numbers to compute with.
_WITHOUT_NUMBERS = IDENTITIES | CASTS


@dataclass(frozen=True)
class Form:
    """A way to run an operator: as what it reads its operands, and what its results are."""

    needs: tuple[Global, ...]
    gives: tuple[Global, ...]


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
    if target not in _BOUNDED and (not is_pointwise(target) or target in _WITHOUT_NUMBERS):
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
    found = rule_of(node, given, layout, shapes)
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
    args: tuple[Any, ...] = map_arg(node.args, lambda _: next(others))
    kwargs = map_arg(node.kwargs, lambda _: next(others))
    if node.target in SIZED_VIEWS:
        local = args[0]
        if not value_of(local).is_contiguous():
            local = call(
                aten.clone.default, (local,), {"memory_format": torch.contiguous_format}, like=node, before=before
            )
        args = (local, results[0].local_shape(layout, coordinate))
    elif node.target is aten.expand.default:
        args = (args[0], results[0].local_shape(layout, coordinate), *args[2:])
    mark = results[0].mark(layout) if isinstance(node.meta["val"], torch.Tensor) else None
    return call(function_of(node), args, kwargs, like=node, before=before, mark=mark)


def is_reduction(node: torch.fx.Node) -> bool:
    return node.target in REDUCTIONS


def may_round(node: torch.fx.Node, result: Global) -> bool:
    """Whether a sum is rounded to a narrow dtype on each rank before it is summed over ranks."""
    value = node.meta["val"]
    owes = any(isinstance(p, Partial) for p in result.placements)
    return node.target in REDUCTIONS and owes and value.is_floating_point() and value.element_size() < 4
