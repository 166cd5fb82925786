"""Manual regions: parts of a program that work on local tensors, while the compiler shards the rest.

    local = enable_manual_sharding(x, ("dp", None))            # x sharded along dp: this rank's rows, a plain tensor
    local = my_kernel(local)                                   # may contain collectives
    y = disable_manual_sharding(local, ("dp", None), x.shape)  # a tensor of the global shape again: in eager full on
                                                               # every rank, else as the compiler shards it

    @manual_region(in_specs=(("dp", None),), out_specs=("dp", None))
    def region(local): ...                                     # the same as a function of global tensors

With `axes` only those mesh axes are manual: inside, a tensor is a DTensor over the other axes, with the shape of its
shard along the manual axes, and the compiler goes on sharding it. Regions nest: an inner one takes further axes of such
a tensor.

Gradients: a tensor that is replicated along an axis in a region gets gradients from every device of the axis, which are
summed; a result that is declared equal along an axis passes each device its share, 1/size, of the gradient. Together
they are the gradient of the global program, if the region's own collectives are differentiated correctly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from dtensor_compile.errors import ManualRegionError, MeshError
from dtensor_compile.spmd.annotate import mesh_text_in_program
from dtensor_compile.spmd.constraint import as_dtensor, whole
from dtensor_compile.spmd.logical_mesh import Mesh, axis_name, device_mesh_of, dims_in, get_global_mesh, sub_mesh
from dtensor_compile.spmd.partition_spec import Axes, PartitionSpec, axes_to_placements

#: Mesh axes by index.
Indices = tuple[int, ...]


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None, axes: Sequence[str | int] | None = None
) -> torch.Tensor:
    """The local tensor of `t` on this device, sharded by the spec; see the module docstring.

    Args:
        t: a tensor of global shape; in a region over other axes, one of that region.
        partition_spec: may name manual axes and, after them, others.
        mesh: defaults to the global mesh.
        axes: the axes that become manual; defaults to all.

    Raises:
        ManualRegionError: an axis does not divide the dim that it shards, or a manual axis comes after one that is not.
        MeshError, PlacementError: no mesh, an unknown axis, an invalid spec.
    """
    mesh, cut, manual = _arguments(partition_spec, mesh, axes, t.dim())
    for dim, entry in enumerate(cut):
        pieces = _pieces(entry, manual, mesh.mesh_shape)
        if t.shape[dim] % pieces:
            raise ManualRegionError(
                f"dim {dim} of size {t.shape[dim]} cannot be split into {pieces} equal pieces for a manual region"
            )
        if [a in manual for a in entry] != sorted([a in manual for a in entry], reverse=True):
            raise ManualRegionError(
                f"dim {dim} is sharded along a manual axis after one that is not manual: {partition_spec}"
            )
    return to_manual(t, mesh_text_in_program(mesh, t), cut, manual)


def disable_manual_sharding(
    t: torch.Tensor,
    partition_spec: PartitionSpec,
    full_shape: Sequence[int],
    *,
    mesh: Mesh | None = None,
    axes: Sequence[str | int] | None = None,
) -> torch.Tensor:
    """The global tensor of which each device has shard `t`; inverse of `enable_manual_sharding` with the same `mesh`
    and `axes`.

    Raises:
        ManualRegionError: the shards do not make up `full_shape`, or an axis is not manual here.
        MeshError, PlacementError: as for `enable_manual_sharding`.
    """
    mesh, cut, manual = _arguments(partition_spec, mesh, axes, t.dim())
    made = [size * _pieces(entry, manual, mesh.mesh_shape) for size, entry in zip(t.shape, cut)]
    if list(full_shape) != made:
        raise ManualRegionError(
            f"pieces of shape {list(t.shape)} make {made} with {tuple(partition_spec)}, not {list(full_shape)}"
        )
    return from_manual(t, mesh_text_in_program(mesh, t), cut, manual)


def manual_region(
    in_specs: Sequence[PartitionSpec | None],
    out_specs: Any,
    *,
    mesh: Mesh | None = None,
    axes: Sequence[str | int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that makes a function of local tensors a function of global tensors.

    Args:
        in_specs: the spec of each positional argument; None passes the argument on unchanged.
        out_specs: the spec of the result, or a list of specs for a tuple of results.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def region(*args: Any) -> Any:
            if len(args) != len(in_specs):
                raise ManualRegionError(
                    f"{function.__name__} takes {len(in_specs)} arguments, one per spec, not {len(args)}"
                )
            inside = [
                arg if spec is None else enable_manual_sharding(arg, spec, mesh=mesh, axes=axes)
                for arg, spec in zip(args, in_specs)
            ]
            result = function(*inside)
            if isinstance(out_specs, list):
                return tuple(_close(value, spec, mesh, axes) for value, spec in zip(result, out_specs, strict=True))
            return _close(result, out_specs, mesh, axes)

        return region

    return decorate


def _close(t: torch.Tensor, spec: PartitionSpec, mesh: Mesh | None, axes: Sequence[str | int] | None) -> torch.Tensor:
    real, cut, manual = _arguments(spec, mesh, axes, t.dim())
    return from_manual(t, mesh_text_in_program(real, t), cut, manual)


def _arguments(
    spec: PartitionSpec, mesh: Mesh | None, axes: Sequence[str | int] | None, ndim: int
) -> tuple[Mesh, Axes, Indices]:
    mesh = mesh if mesh is not None else get_global_mesh()
    if mesh is None:
        raise MeshError("a manual region needs a mesh: pass one, or call set_global_mesh first")
    every = tuple(range(len(mesh.mesh_shape)))
    manual = every if axes is None else tuple(sorted([entry[0] for entry in mesh.axes(tuple(axes))]))
    return mesh, mesh.axes(spec, ndim), manual


# ---- in the graph --------------------------------------------------------------------------------------------------


class _Share(torch.autograd.Function):
    """Identity, whose gradient is scaled to this device's share."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: float) -> torch.Tensor:
        ctx.part = part
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.part, None


@torch.compiler.allow_in_graph
def to_manual(t: torch.Tensor, text: str, axes: Axes, manual: Indices) -> torch.Tensor:
    """The local tensor of `t` along the manual axes; a DTensor over the other axes, if there are any."""
    mesh = device_mesh_of(text)
    here = [i for i in range(mesh.ndim)] if not isinstance(t, DTensor) else dims_in(mesh, t.device_mesh)
    for i in manual:
        if i not in here:
            raise ManualRegionError(
                f"mesh axis {axis_name(mesh, i)!r} is manual already: a nested region must use other axes"
            )
    own = as_dtensor(t, sub_mesh(mesh, here)).redistribute(placements=_placements(axes, mesh, here))
    rest = [i for i in here if i not in manual]
    back = [Partial() if p.is_replicate() and i in manual else p for i, p in zip(here, own.placements)]
    local = own.to_local(grad_placements=back)
    if not rest:
        return local
    kept = _rest_of(axes, manual, mesh, rest)
    shape = [size // _pieces(entry, manual, mesh.shape) for size, entry in zip(t.shape, axes)]
    return _of_shape(local, sub_mesh(mesh, rest), kept, shape)


@torch.compiler.allow_in_graph
def from_manual(t: torch.Tensor, text: str, axes: Axes, manual: Indices) -> torch.Tensor:
    """The DTensor over the manual axes and those that `t` is already a DTensor over; plain and full if those are all
    axes.
    """
    placed = placed_from_manual(t, text, axes, manual)
    return whole(placed) if placed.device_mesh.ndim == device_mesh_of(text).ndim else placed


def placed_from_manual(t: torch.Tensor, text: str, axes: Axes, manual: Indices) -> DTensor:
    """`from_manual`, but always a DTensor: replaces it in a graph."""
    mesh = device_mesh_of(text)
    rest = dims_in(mesh, t.device_mesh) if isinstance(t, DTensor) else []
    for i in manual:
        if i in rest:
            raise ManualRegionError(
                f"mesh axis {axis_name(mesh, i)!r} is not manual here: close a region along the axes with which it was "
                "opened"
            )
    here = sorted({*manual, *rest})
    placed = dict(zip(here, _placements(axes, mesh, here)))
    used = {axis for entry in axes for axis in entry}
    copies = math.prod(mesh.size(i) for i in manual if i not in used)
    shape = [size * _pieces(entry, manual, mesh.shape) for size, entry in zip(t.shape, axes)]
    if isinstance(t, DTensor):
        t = t.redistribute(placements=_rest_of(axes, manual, mesh, rest)).to_local()
    local = _Share.apply(t, 1 / copies) if copies > 1 else t
    return _of_shape(local, sub_mesh(mesh, here), list(placed.values()), shape)


def _of_shape(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The DTensor of that global shape; axes that are not manual may shard it unevenly."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides))


def _pieces(entry: Sequence[int], manual: Indices, mesh_shape: Sequence[int]) -> int:
    """Number of pieces into which the manual axes among these split a dim."""
    return math.prod([mesh_shape[axis] for axis in entry if axis in manual])


def _placements(axes: Axes, mesh: DeviceMesh, here: Sequence[int]) -> list[Placement]:
    placements = axes_to_placements(axes, tuple(mesh.shape))
    unknown = [i for i, p in enumerate(placements) if not isinstance(p, Replicate) and i not in here]
    if unknown:
        raise ManualRegionError(
            f"mesh axis {axis_name(mesh, unknown[0])!r} is manual already: inside, a tensor is not sharded along it"
        )
    return [placements[i] for i in here]


def _rest_of(axes: Axes, manual: Indices, mesh: DeviceMesh, rest: Sequence[int]) -> list[Placement]:
    """Placements of a manual shard along the axes that are not manual."""
    left = tuple(tuple(axis for axis in entry if axis not in manual) for entry in axes)
    return [axes_to_placements(left, tuple(mesh.shape))[i] for i in rest]
