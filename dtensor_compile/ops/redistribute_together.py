"""``dtensor_compile::redistribute_together``: several changes of placement, as one operator over local tensors.

    redistribute_together(Tensor[] locals, str[] sources, str[] targets, str[] meshes, SymInt[] sizes) -> Tensor[]

Each result is that of ``dtensor_compile::redistribute`` for the arguments at its place; `sizes` are the global shapes
one after the other, each with as many dims as its local tensor. AOTAutograd traces an operator in several passes and
through several modes: one operator for the parameters of a wrapped module costs little more than for one of them.
`dtensor_compile.passes.separate_redistributions` takes it apart before anything is planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dtensor_compile.ops.redistribute import carry_out, fake_result_of

_library = torch.library.Library("dtensor_compile", "FRAGMENT")
_library.define(
    "redistribute_together(Tensor[] locals, str[] sources, str[] targets, str[] meshes, SymInt[] sizes) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)

redistribute_together_op = torch.ops.dtensor_compile.redistribute_together.default

#: Source, target, mesh and global shape, as for ``dtensor_compile::redistribute``.
Change = tuple[str, str, str, Sequence[Any]]


def redistribute_together(locals_: Sequence[torch.Tensor], changes: Sequence[Change]) -> list[torch.Tensor]:
    """The results of the operator."""
    sources, targets, meshes, shapes = (list(each) for each in zip(*changes, strict=True))
    return redistribute_together_op(list(locals_), sources, targets, meshes, list(itertools.chain(*shapes)))


def changes_of(
    dims: Sequence[int], sources: Sequence[str], targets: Sequence[str], meshes: Sequence[str], sizes: Sequence[Any]
) -> Iterator[Change]:
    """The changes, of the arguments of the operator after its first one.

    Args:
        dims: the number of dims of each local tensor.
    """
    ends = list(itertools.accumulate(dims))
    shapes = [list(sizes[end - n : end]) for n, end in zip(dims, ends, strict=True)]
    return zip(sources, targets, meshes, shapes, strict=True)


def _carry_out(locals: list[torch.Tensor], *arguments: list[Any]) -> list[torch.Tensor]:  # noqa: A002 - the schema's name
    changes = changes_of([local.dim() for local in locals], *arguments)
    return [carry_out(local, *change) for local, change in zip(locals, changes, strict=True)]


def _fake(locals: list[torch.Tensor], *arguments: list[Any]) -> list[torch.Tensor]:  # noqa: A002
    changes = changes_of([local.dim() for local in locals], *arguments)
    return [fake_result_of(local, *change) for local, change in zip(locals, changes, strict=True)]


_library.impl("redistribute_together", _carry_out, "CompositeExplicitAutograd")
_library._register_fake("redistribute_together", _fake)
