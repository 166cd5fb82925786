"""Annotations inside of a compiled function: calls that Dynamo keeps as single nodes of its graph.

Like a redistribution, a constraint is one node of text and integers: the tensor, the text of the mesh, the axes that
shard each dim.

    constrain(x, "cpu[dp=2:2,tp=2:1]@4", ((0,), ()), False)        x is S(0)R from here on

A plain tensor has the same value on all ranks, before and after: to Dynamo, eager and other backends the call is the
identity. `spmd.spread` implements it: there the tensor becomes a DTensor, and the constraint a redistribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from dtensor_compile.errors import ManualRegionError
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.spmd.logical_mesh import axis_name, device_mesh_of, dims_in, sub_mesh
from dtensor_compile.spmd.partition_spec import Axes, axes_to_placements


class _PlacedBothWays(torch.autograd.Function):
    """Redistributes the tensor in the forward, and its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
        ctx.where = mesh, placements
        return x.redistribute(mesh, placements) if x.placements != placements else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None, None]:  # type: ignore[override]
        return gradient.redistribute(*ctx.where), None, None


@torch.compiler.allow_in_graph
def constrain(x: torch.Tensor, mesh_text: str, axes: Axes, gradients: bool) -> torch.Tensor:
    """`x` sharded along `axes` of a mesh (per tensor dim), with `gradients` also its gradient.

    Raises:
        ManualRegionError: `x` is in a manual region along one of these axes.
    """
    if not isinstance(x, DTensor):
        return x.view_as(x)
    mesh = device_mesh_of(mesh_text)
    placements, here = axes_to_placements(axes, parse_mesh(mesh_text).shape), dims_in(mesh, x.device_mesh)
    for dim, placement in enumerate(placements):
        if dim not in here and not placement.is_replicate():
            raise ManualRegionError(
                f"mesh axis {axis_name(mesh, dim)!r} is manual here: a mark in the region can only use other axes"
            )
    where = x.device_mesh, tuple([placements[i] for i in here])
    return _PlacedBothWays.apply(x, *where) if gradients else x.redistribute(*where)


@torch.compiler.allow_in_graph
def agree(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors, all with the placements of the first DTensor among them."""
    first = next((x for x in tensors if isinstance(x, DTensor)), None)
    if first is None:
        return tuple(x.view_as(x) for x in tensors)
    return tuple(as_dtensor(x, first.device_mesh).redistribute(first.device_mesh, first.placements) for x in tensors)


def as_dtensor(x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor, equal on all ranks, as a replicated DTensor; a DTensor unchanged."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def replicated(x: torch.Tensor, mesh_text: str, dims: Sequence[int] | None = None) -> DTensor:
    """`as_dtensor` as a node of a graph, over the whole mesh, or over these dims of it in a region that is manual along
    the others.
    """
    mesh = device_mesh_of(mesh_text)
    return as_dtensor(x, mesh if dims is None else sub_mesh(mesh, dims))


def whole(x: DTensor) -> torch.Tensor:
    """The full value as a plain tensor; its gradient is a full tensor, too."""
    return x.redistribute(x.device_mesh, [Replicate()] * x.device_mesh.ndim).to_local()


def whole_copy(x: DTensor) -> torch.Tensor:
    """`whole` in memory of its own, which the program may write to."""
    return whole(x).clone()


def ones_of(x: DTensor) -> torch.Tensor:
    """Ones with the global shape and strides of `x`, on which random numbers of the full tensor are drawn without
    communication.
    """
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1)


def write_whole(x: DTensor, value: torch.Tensor) -> torch.Tensor:
    """`x` with the plain, full `value` written to it."""
    return x.copy_(as_dtensor(value, x.device_mesh))


def update_statistics(x: DTensor, mean: torch.Tensor, var: torch.Tensor, momentum: float) -> None:
    """Updates plain running statistics as ``batch_norm`` does, for `x` of shape (batch, channels, ...); only sums of
    shards are sent.
    """
    values: Any = x.detach()  # a DTensor, as its sums are
    dims = [dim for dim in range(x.dim()) if dim != 1]
    n = x.numel() // x.shape[1]
    here = whole(values.sum(dims)) / n
    centered = values - here.reshape([-1 if dim == 1 else 1 for dim in range(x.dim())])
    mean.copy_(momentum * here + (1 - momentum) * mean)
    var.copy_(momentum * whole((centered * centered).sum(dims)) / (n - 1) + (1 - momentum) * var)


def mean_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float | None,
) -> torch.Tensor:
    """``cross_entropy`` or, if `label_smoothing` is None, ``nll_loss`` of class indices with ``reduction="mean"``, on
    shards.

    The sum of the losses over the sum of the weights of the targets that are not ignored, both over all ranks. Before
    torch 2.14, DTensor averages the means of the ranks, which is a different number if their numbers of targets differ;
    since 2.14 it gathers `input`."""
    mesh = next((x.device_mesh for x in (input, target) if isinstance(x, DTensor)), None)
    if weight is not None and mesh is not None:
        weight = as_dtensor(weight, mesh)
    if label_smoothing is None:
        total = F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction="sum")
    else:
        total = F.cross_entropy(
            input, target, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
        )
    counts = target != ignore_index
    weights = counts.to(torch.promote_types(total.dtype, torch.float32))  # bfloat16 cannot count beyond 256
    if weight is not None:
        weights = weights * F.embedding(torch.where(counts, target, 0), weight.unsqueeze(1)).squeeze(-1)
    return (total / weights.sum()).to(total.dtype)
