"""Properties of operators, as sets of overloads and predicates; passes keep no lists of their own.

Views, from the narrowest set to the widest:

    SIZED_VIEWS        the sizes of the result are an argument
    SHAPE_VIEWS        ... or the shape stays: a view of one contiguous tensor as another
    RESHAPES           ... or a copy where no view has that shape; rows stay rows
    ORDERED_VIEWS      ... or dims of size 1 come and go; elements stay in their order

`VIEWS` alias memory, or part of it, without a kernel; items of lists are included.

Rules that need more than a set (the dims on which an operator acts, its partial sums) are part of the algebra,
``passes/spec_rules.py``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from dtensor_compile.graph.arguments import list_arg

aten = torch.ops.aten

#: Views whose arguments are the tensor and the sizes of the result.
SIZED_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})

#: Views of a tensor as it is in memory, in the same shape or another one.
SHAPE_VIEWS = SIZED_VIEWS | {aten.detach.default, aten.alias.default}

#: The same, including operators that copy if they have to.
RESHAPES = SHAPE_VIEWS | {aten.reshape.default}

#: Operators that keep the order of elements.
ORDERED_VIEWS = RESHAPES | {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}

#: Operators that return several views of one tensor.
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})

#: Operators that permute dims.
PERMUTATIONS = frozenset({aten.transpose.int, aten.t.default, aten.permute.default})

#: Operators that run no kernel: the result aliases the argument. Items of any list count. This differs from the schema
#: (`is_view`): ``reshape`` is here, since traced ones are views, and ``squeeze.dims`` is not, so that it counts as a
#: kernel.
VIEWS = SPLITS | PERMUTATIONS | RESHAPES | {
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.expand.default, aten.view_as_real.default, aten.view_as_complex.default, operator.getitem,
}  # fmt: skip

#: Operators that return the values of their argument in the same shape, so that the result has its global form.
IDENTITIES = frozenset({aten.clone.default, aten.detach.default, aten.alias.default})

#: Operators that copy their argument to another layout.
LAYOUT_COPIES = frozenset({aten.clone.default, aten.cat.default, aten.constant_pad_nd.default})

#: Operators that return the values of their argument in another dtype (or on another device).
CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})

#: Sums of two terms.
TWO_TERM_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})

#: Operators that commute with a sum over ranks if all operands are such sums.
SUMS = TWO_TERM_SUMS | {aten.neg.default}

#: Operators that, for operands of the same sizes on every rank, return a result of the same sizes on every rank;
#: elementwise operators do so too (`is_pointwise`).
SIZES_FOLLOW = IDENTITIES | CASTS | PERMUTATIONS | RESHAPES | {aten.mm.default, aten.unsqueeze.default}

#: Matmuls, by their names in reports.
MATMULS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})

#: Prefixes of names of operators whose kernels are not generated.
LIBRARY_KERNELS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product", "_scaled_mm", "_grouped_mm", "sort", "topk",
)  # fmt: skip


def is_pointwise(target: Any) -> bool:
    """Whether an operator computes each element of its result from the elements at that place."""
    return torch.Tag.pointwise in getattr(target, "tags", ())


def is_view(target: Any) -> bool:
    """Whether the result of an operator is a view of its argument, by its schema."""
    return bool(getattr(target, "is_view", False))


def is_mutable(target: Any) -> bool:
    """Whether an operator writes to an argument, by its schema."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def transposes(node: torch.fx.Node) -> bool:
    """Whether a node is the transpose of a matrix."""
    return node.target is aten.t.default or node.target is aten.permute.default and list_arg(node, 1) == [1, 0]
