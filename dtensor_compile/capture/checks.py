"""Checks before compilation: a program that cannot work raises an error here on every rank, and does not hang later."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dtensor_compile.capture.trace import emit_redistribution, emit_redistributions
from dtensor_compile.compat.aot.symbolic.shapes import size_hints
from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.dtensor.specs import Spec, StridedShard, redistribute_hook, redistribute_local
from dtensor_compile.compat.dynamo.trackers.communication_counts import is_counting
from dtensor_compile.compat.pytree import tree_leaves
from dtensor_compile.errors import MeshError, NoProcessGroupError, PlacementError
from dtensor_compile.graph.node_costs import GROUP_ARGUMENTS
from dtensor_compile.graph.nodes import source_line
from dtensor_compile.ir.mesh import mesh_layout, mesh_text
from dtensor_compile.ir.spec import REDUCE_OPS
from dtensor_compile.planner.shard_intervals import chunk_sizes, cuts_evenly


def check_program(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Checks the process groups and the meshes that a graph uses.

    A program that uses neither compiles without a process group (on one GPU, on a laptop, in a unit test), with one
    warning.

    Raises:
        NoProcessGroupError: ``torch.distributed`` is not initialized and the program needs it, or a group of a mesh was
            destroyed.
        MeshError: a mesh names ranks that do not exist, or an unavailable device type.
        PlacementError: the placements of an input do not fit its mesh or its number of dims.
    """
    if not dist.is_available() or not dist.is_initialized():
        used = next(_distributed(gm, example_inputs), None)
        if used is not None:
            raise NoProcessGroupError(
                f"the program uses {used}, which needs a process group: call torch.distributed.init_process_group() "
                "before the first call of the compiled function (under torchrun it needs no arguments)"
            )
        _note_that_nothing_is_distributed()
        return
    for mesh in {id(mesh): mesh for mesh in _meshes(gm, example_inputs)}.values():
        check_mesh(mesh)
    names = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]
    for name, value in zip(names, example_inputs):
        if isinstance(value, DTensor):
            check_placements(value.placements, value.device_mesh, value.dim(), f"input {name}")


@functools.cache
def _note_that_nothing_is_distributed() -> None:
    text = "there is no process group, and the program uses none: it is compiled for a single process"
    warnings.warn(f"dtensor_compile: {text}", stacklevel=2)


def _distributed(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[str]:
    """Descriptions of the parts of a program that need a process group."""
    for mesh in _meshes(gm, example_inputs):
        yield f"the mesh {mesh_layout(mesh)}"
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            of_ours = inspect.isfunction(node.target) and node.target.__module__.startswith(
                ("dtensor_compile.", "torch.distributed.")
            )
            if of_ours or not _ARGUMENTS.isdisjoint(_argument_names(node.target)):
                yield f"{getattr(node.target, '__name__', node.target)} ({source_line(node)})"


#: Arguments of operators that need a process group.
_ARGUMENTS = frozenset((*GROUP_ARGUMENTS, "mesh"))


def _argument_names(target: Any) -> Iterator[str]:
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload):
        yield from (argument.name for argument in target._schema.arguments)


def check_placements(placements: Sequence[Placement], mesh: DeviceMesh, ndim: int, what: str) -> None:
    """Raises `PlacementError` unless there is one placement per mesh dim and each shard names one of the `ndim` tensor
    dims.
    """
    layout = mesh_layout(compat_mesh.real_mesh(mesh))
    if len(placements) != len(layout.dims):
        raise PlacementError(
            f"{what} cannot have the placements {tuple(placements)}: the mesh {layout} has {len(layout.dims)} dims, "
            "and every mesh dim takes one placement"
        )
    check_shard_dims(placements, mesh, ndim, what)


def check_shard_dims(placements: Sequence[Placement], mesh: DeviceMesh, ndim: int, what: str) -> None:
    """Raises `PlacementError` unless each shard names one of the `ndim` tensor dims."""
    layout = mesh_layout(compat_mesh.real_mesh(mesh))
    for placement, dim in zip(placements, range(len(layout.dims))):
        if isinstance(placement, (Shard, StridedShard)) and not -ndim <= placement.dim < ndim:
            raise PlacementError(
                f"{what} cannot be {placement!r} over mesh dim {layout.dim_name(dim)} of {layout}: it has {ndim} dims, "
                f"so a shard takes a dim from 0 to {ndim - 1}"
            )


def check_reductions(placements: Sequence[Placement], what: str) -> None:
    """Raises `PlacementError` if a tensor is partial with a reduction that no collective computes, or with two that do
    not commute.

    Placements of a user-defined class may reduce as they like.
    """
    unknown = [p.reduce_op for p in placements if type(p) is Partial and p.reduce_op not in REDUCE_OPS]
    if unknown:
        raise PlacementError(
            f"{what} cannot be Partial({unknown[0]!r}): no collective computes this reduction; supported are "
            f"{', '.join(REDUCE_OPS)}"
        )
    check_commuting(placements, what)


def check_commuting(placements: Sequence[Placement], what: str) -> None:
    """Raises `PlacementError` if a tensor is partial with two reductions whose order matters (as torch does, but with
    advice).
    """
    ops = list(dict.fromkeys(p.reduce_op for p in placements if type(p) is Partial))
    if len(ops) > 1 and not set(ops) <= {"sum", "avg"}:
        one = ", ".join(str(Replicate() if type(p) is Partial and p.reduce_op != ops[0] else p) for p in placements)
        raise PlacementError(
            f"{what} cannot be partial in {' and '.join(ops)} at once: the value depends on which is reduced first; "
            f"reduce one before the other becomes partial, as in [{one}]"
        )


@contextlib.contextmanager
def check_redistributions() -> Iterator[None]:
    """While active, a redistribution to a shard of a dim that does not exist raises `PlacementError` (torch: an
    IndexError), and so does one of partial values that cannot be combined.

    A dynamic size is made static where a rank gets one row of it or none: torch specializes 0 and 1, so that this rank
    would make it static and the others would not, and their graphs would call different collectives.

    All redistributions use the operator, as later in the trace, except where eager's collectives are counted. torch's
    own code takes longer, warns of collectives that are never called, and for strided shards computes shard offsets
    with index tensors, which have no values while tracing.
    """

    def one(local: torch.Tensor, source: Spec, target: Spec, stock: Callable[[], torch.Tensor]) -> torch.Tensor:
        _check_redistribution(source, target)
        if is_counting() and not any(isinstance(p, StridedShard) for p in (*source.placements, *target.placements)):
            return stock()
        return emit_redistribution(local, source, target, stock)

    def several(
        locals_: Sequence[torch.Tensor], sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> Sequence[torch.Tensor]:
        if is_counting():
            return [redistribute_local(*each) for each in zip(locals_, sources, targets, strict=True)]
        for source, target in zip(sources, targets, strict=True):
            _check_redistribution(source, target)
        return emit_redistributions(locals_, sources, targets)

    with redistribute_hook(one, several):
        yield


def _check_redistribution(source: Spec, target: Spec) -> None:
    if source.tensor_meta is None:
        return
    shape = source.tensor_meta.shape
    check_shard_dims(target.placements, target.mesh, len(shape), f"a tensor of shape {list(shape)}")
    for placements in (source.placements, target.placements):
        _fix_sizes_of_single_rows(shape, placements, compat_mesh.real_mesh(target.mesh).shape)
        check_reductions(placements, f"a tensor of shape {list(shape)}")


def _fix_sizes_of_single_rows(shape: Sequence[Any], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> None:
    for dim, (size, hint) in enumerate(zip(shape, size_hints(shape))):
        cuts = [
            n
            for p, n in zip(placements, mesh_shape)
            if isinstance(p, (Shard, StridedShard)) and p.dim % len(shape) == dim
        ]
        if isinstance(size, torch.SymInt) and cuts and min(chunk_sizes(hint, cuts)) < 2:
            int(size)  # guards on its current value


def check_mesh(mesh: DeviceMesh) -> None:
    """Checks one mesh against this job; raises as `check_program` does."""
    world, layout = dist.get_world_size(), mesh_layout(mesh)
    missing = [rank for rank in layout.ranks if rank >= world]
    if missing:
        raise MeshError(
            f"mesh {layout} covers ranks {missing}, but the job has {world} ranks (0..{world - 1}): "
            f"start {max(missing) + 1} processes or make the mesh smaller"
        )
    if not compat_mesh.device_is_available(mesh.device_type):
        raise MeshError(
            f"mesh {layout} is of device type {mesh.device_type!r}, which is not available in this process: "
            'build the mesh for an available device, for instance init_device_mesh("cpu", ...)'
        )
    if not compat_mesh.is_member(mesh):
        return
    for dim in range(mesh.ndim):
        if not compat_mesh.group_exists(compat_mesh.group_name(mesh, dim)):
            raise NoProcessGroupError(
                f"the process group of dim {layout.dim_name(dim)} of mesh {layout} does not exist any more: "
                "create the mesh again after init_process_group()"
            )


def tensor_meshes(gm: torch.fx.GraphModule) -> list[DeviceMesh]:
    """The meshes of tensors of the graph, each once, in program order."""
    values = [node.meta.get("example_value") for node in gm.graph.nodes]
    meshes = [compat_mesh.real_mesh(value.device_mesh) for value in tree_leaves(values) if isinstance(value, DTensor)]
    return list({mesh_text(mesh): mesh for mesh in meshes}.values())


def _meshes(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[DeviceMesh]:
    values = [*example_inputs, *(node.meta.get("example_value") for node in gm.graph.nodes)]
    for value in values:
        if isinstance(value, DTensor):
            value = value.device_mesh
        mesh = compat_mesh.real_mesh(value)
        if isinstance(mesh, DeviceMesh):
            yield mesh


def shards_are_even(gm: torch.fx.GraphModule) -> bool:
    """Whether every DTensor of a Dynamo graph has local tensors of the same sizes on all ranks."""
    values = tree_leaves([node.meta.get("example_value") for node in gm.graph.nodes])
    return all(_is_even(value) for value in values if isinstance(value, DTensor))


def _is_even(tensor: DTensor) -> bool:
    if not all(isinstance(size, int) for size in tensor.shape):
        return False
    return cuts_evenly(tensor.placements, compat_mesh.real_mesh(tensor.device_mesh).shape, tensor.shape)
