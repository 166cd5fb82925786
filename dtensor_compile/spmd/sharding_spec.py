"""`ShardingSpec`: a sharding for many tensors, and a data loader that gives each rank its slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dtensor_compile.compat.pytree import tree_map
from dtensor_compile.errors import PlacementError
from dtensor_compile.spmd.annotate import mark_sharding, mesh_text_in_program, note_mark, wrap_as_sharded_tensor
from dtensor_compile.spmd.logical_mesh import Mesh, device_mesh_of
from dtensor_compile.spmd.partition_spec import PartitionSpec, axes_to_placements
from dtensor_compile.spmd.propagate import SpreadMark


@dataclass(frozen=True)
class ShardingSpec:
    """Sharding of tensors of one rank (number of dims).

    Attributes:
        mesh, partition_spec: as for `mark_sharding`.
        minibatch: a loader already gives each rank its own part of the batch (dim 0), of the same size on all ranks;
            ranks that have the same shard of dim 0 are given the same part.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool = False

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether the tensor has as many dims as the spec has entries."""
        return t.dim() == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> torch.Tensor:
        """`mark_sharding` of the tensor."""
        return mark_sharding(t, self.mesh, self.partition_spec)

    def slice(self, t: torch.Tensor) -> DTensor:
        """The DTensor with full value `t`, or with `minibatch` with this rank's part `t` of the batch.

        Raises:
            PlacementError: the spec does not fit the tensor, or `minibatch` is set and the spec does not shard dim 0.
        """
        if not self.minibatch:
            return wrap_as_sharded_tensor(t, self.mesh, self.partition_spec)
        axes = self.mesh.axes(self.partition_spec, t.dim())
        if not axes or not axes[0]:
            raise PlacementError(
                f"minibatch: the spec {self.partition_spec} has to shard dim 0, of which each rank has a part"
            )
        mesh = device_mesh_of(mesh_text_in_program(self.mesh, t))
        target = axes_to_placements(axes, self.mesh.mesh_shape)
        have = [p if axis in axes[0] else Replicate() for axis, p in enumerate(target)]
        made = DTensor.from_local(t, mesh, have, run_check=False).redistribute(mesh, target)
        note_mark(made, self.mesh, SpreadMark(axes))
        return made


class ShardedLoader:
    """A data loader that returns tensors as DTensors, of which each rank keeps its slice.

    Args:
        loader: returns batches, nested containers of tensors.
        input_sharding: for every tensor that it fits (`ShardingSpec.can_apply`), or by key for batches that are
            mappings. Tensors without one are unchanged.
    """

    def __init__(self, loader: Iterable[Any], input_sharding: ShardingSpec | Mapping[str, ShardingSpec]) -> None:
        self.loader, self.input_sharding = loader, input_sharding

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self._sliced(batch)

    def _sliced(self, batch: Any) -> Any:
        def slices(spec: ShardingSpec) -> Any:
            return lambda t: spec.slice(t) if isinstance(t, torch.Tensor) and spec.can_apply(t) else t

        if isinstance(self.input_sharding, ShardingSpec):
            return tree_map(slices(self.input_sharding), batch)
        unknown = set(self.input_sharding) - set(batch)
        if unknown:
            raise PlacementError(f"the batch has no {sorted(unknown)}; its keys are {sorted(batch)}")
        return {
            key: tree_map(slices(self.input_sharding[key]), value) if key in self.input_sharding else value
            for key, value in batch.items()
        }
