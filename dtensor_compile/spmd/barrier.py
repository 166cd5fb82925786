"""`apply_backward_optimization_barrier`: keeps the backward of a module separate from that of its neighbours.

The gradients that enter the module's backward, and those that leave it, pass through one operator that is opaque to
compilers: kernels on its two sides are not fused, and nothing that needs its results runs before all of its arguments
are computed. The forward, and all numbers, are unchanged; each gradient at the border is copied once.

    before   ... mul(mul(g, a), b) ...                                one kernel
    after    ... mul(backward_barrier([mul(g, a)])[0], b) ...         two
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.dtensor.specs import local_and_spec, with_local
from dtensor_compile.compat.pytree import tree_flatten, tree_unflatten

_library = torch.library.Library("dtensor_compile", "FRAGMENT")
_library.define("backward_barrier(Tensor[] xs) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))


def _copies(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in xs]


_library.impl("backward_barrier", _copies, "CompositeExplicitAutograd")
_library._register_fake("backward_barrier", lambda xs: [torch.empty_like(x) for x in xs])


class _Border(torch.autograd.Function):
    """Identity on tensors, with a barrier for their gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        there = [
            (i, *(local_and_spec(g) if isinstance(g, DTensor) else (g, None)))
            for i, g in enumerate(gradients)
            if g is not None
        ]
        behind = torch.ops.dtensor_compile.backward_barrier([local for _, local, _ in there])
        made = {i: with_local(local, spec) if spec is not None else local for (i, _, spec), local in zip(there, behind)}
        return tuple(made.get(i) for i in range(len(gradients)))


@torch.compiler.allow_in_graph
def border(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors, with a barrier for their gradients."""
    return _Border.apply(*tensors)


def _with_border(values: Any) -> Any:
    leaves, structure = tree_flatten(values)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not places:
        return values
    for i, leaf in zip(places, border(*[leaves[i] for i in places])):
        leaves[i] = leaf
    return tree_unflatten(leaves, structure)


def apply_backward_optimization_barrier(module: nn.Module) -> nn.Module:
    """Puts a barrier around the backward of a module; returns the module. Its forward may take and return nested
    containers of tensors.
    """
    module.register_forward_pre_hook(lambda _, args, kwargs: _with_border((args, kwargs)), with_kwargs=True)
    module.register_forward_hook(lambda _, args, result: _with_border(result))
    return module
