"""The algebra of specs: how operators move to the other side of a redistribution.

    f(redistribute(x, A -> B), y)  =  redistribute(f'(x, y'), A' -> B')

In: a node, and spec and global shape of each tensor that it reads. Out: spec and global shape of its result, and the
specs in which it has to read its operands; y' is y sharded as A is, which costs nothing if y is the same on every rank.

One table (``spec_rules.py``) has the rule of each operator along one mesh dim; mesh dims are independent:

- Elementwise operators keep shards, if all operands are sharded in the same way. Sums and differences of partial sums
  are partial sums; so is the product of a partial sum with a replicated tensor.
- Matmuls: rows, columns and batches stay sharded; shards of the contracted dim give a partial sum, and so does an
  operand that is one.
- Permutations rename dims. Views keep, split or merge dims. If shards are even, the outermost of the dims that a
  sharded dim is split into is sharded, and a merged dim is sharded if the outermost of its dims is.
- Reductions drop dims. If a dropped dim is sharded, a sum becomes a partial sum. Maxima and minima do not move then:
  the maximum of a communication library may lose a nan.
- Slices, norms, softmax and the like act on some dims and leave shards of the others alone; lookups leave shards of the
  indices, and of dims other than the indexed one.

Arithmetic on partial sums rounds each term, so that it does not move if elements have fewer than four bytes.

A graph does not say whether numbers in it are the same on every rank: a program may compute with its own rank.
`has_numbers` finds the nodes for which that matters; a mark of the result (``graph/global_annotations.py``) says that
they are the same.
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
from dtensor_compile.graph.nodes import call_before
from dtensor_compile.graph.operator_traits import CASTS, IDENTITIES, SIZED_VIEWS, is_pointwise
from dtensor_compile.ir.mesh import MeshLayout
from dtensor_compile.passes.global_tensor import Global, Placements, Shape
from dtensor_compile.passes.spec_rules import REDUCTIONS, R, Strategy, rule_of

aten = torch.ops.aten

#: Operators with number arguments that are not dims or shapes.
_BOUNDED = (
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default,
    aten.linalg_vector_norm.default,
    aten.native_layer_norm.default, aten._fused_rms_norm.default,
)  # fmt: skip

#: Elementwise operators whose other arguments are not operands of the computation.
_WITHOUT_NUMBERS = IDENTITIES | CASTS


@dataclass(frozen=True)
class Form:
    """A way to run an operator: global forms of its operands and of its results."""

    needs: tuple[Global, ...]
    gives: tuple[Global, ...]


def tensors_of(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """The tensors that a node reads, in the order of its arguments; None if it reads another kind of node."""
    found: list[torch.fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found if all(isinstance(x.meta.get("val"), torch.Tensor) for x in found) else None


def has_numbers(node: torch.fx.Node) -> bool:
    """Whether arguments of a node are numbers or bounds that may differ between ranks. (Dims and shapes of views may
    not.)
    """
    target = node.target
    if target not in _BOUNDED and (not is_pointwise(target) or target in _WITHOUT_NUMBERS):
        return False
    found: list[Any] = []
    tree_map(found.append, (node.args[1:], dict(node.kwargs)))
    return any(isinstance(value, (int, float, complex)) for value in found)


def form_of(
    node: torch.fx.Node, given: Sequence[Global], layout: MeshLayout, shapes: tuple[Shape, ...] | None = None
) -> Form | None:
    """The form in which `node` runs on operands that are `given`; None if there is none.

    The form may need shards of operands that are replicated along a mesh dim.

    Args:
        given: global forms of the tensors that it reads, in the order of `tensors_of`.
        layout: layout of the mesh that all of them are on.
        shapes: global shapes of the results, if known. If not, those of a view follow from `given`, which then has to
            be its operand in the graph.
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
    """The strategies that operands with these placements can follow: first those that need no change, then those that
    shard replicated operands.
    """
    strategies = list(strategies)
    yield from (s for s in strategies if s[0] == have)
    yield from (s for s in strategies if all(a == b or a == R and isinstance(b, Shard) for a, b in zip(have, s[0])))


def run_on_locals(
    node: torch.fx.Node,
    operands: Sequence[torch.fx.Node],
    results: Sequence[Global],
    layout: MeshLayout,
    coordinate: Sequence[int],
    before: torch.fx.Node,
) -> torch.fx.Node:
    """Runs the operator of `node` on other local tensors, which gives the local tensors of `results`; returns a new
    node in front of `before`.
    """
    others = iter(operands)
    args: tuple[Any, ...] = map_arg(node.args, lambda _: next(others))
    kwargs = map_arg(node.kwargs, lambda _: next(others))
    if node.target in SIZED_VIEWS:
        local = args[0]
        if not value_of(local).is_contiguous():
            local = call_before(
                aten.clone.default, (local,), {"memory_format": torch.contiguous_format}, like=node, before=before
            )
        args = (local, results[0].local_shape(layout, coordinate))
    elif node.target is aten.expand.default:
        args = (args[0], results[0].local_shape(layout, coordinate), *args[2:])
    mark = results[0].mark(layout) if isinstance(node.meta["val"], torch.Tensor) else None
    return call_before(function_of(node), args, kwargs, like=node, before=before, mark=mark)


def is_reduction(node: torch.fx.Node) -> bool:
    return node.target in REDUCTIONS


def may_round(node: torch.fx.Node, result: Global) -> bool:
    """Whether a sum is rounded to a narrow dtype on each rank before it is summed over ranks."""
    value = node.meta["val"]
    partial = any(isinstance(p, Partial) for p in result.placements)
    return node.target in REDUCTIONS and partial and value.is_floating_point() and value.element_size() < 4
