"""The global tensor of a local one, as passes compute with it: placements, and a shape of integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard
from dtensor_compile.graph.global_annotations import Mark
from dtensor_compile.ir.mesh import MeshLayout
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.ops.expand import local_shape

Placements = tuple[Placement, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Global:
    """The global form of a local tensor: placements on a mesh, and a shape of plain integers."""

    placements: Placements
    shape: Shape

    @classmethod
    def of(cls, spec: str, shape: Sequence[Any]) -> Global | None:
        """The global form for a spec and a shape; None if the shape is symbolic, or shards are strided."""
        placements = parse_spec(spec)
        if not all(type(size) is int for size in shape) or not all(
            type(p) in (Shard, Replicate, Partial) for p in placements
        ):
            return None
        return cls(placements, tuple(shape))

    @property
    def spec(self) -> str:
        return spec_text(self.placements)

    def mark(self, layout: MeshLayout) -> Mark:
        return Mark(self.spec, str(layout), self.shape)

    def shards(self, dim: int) -> list[int]:
        """The mesh dims that shard a tensor dim."""
        return [i for i, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim]

    def pieces(self, dim: int, layout: MeshLayout) -> int:
        """Number of shards of a tensor dim."""
        return math.prod(layout.shape[i] for i in self.shards(dim))

    def is_even(self, layout: MeshLayout) -> bool:
        return not any(size % self.pieces(dim, layout) for dim, size in enumerate(self.shape))

    def local_shape(self, layout: MeshLayout, coordinate: Sequence[int]) -> list[int]:
        return local_shape(self.placements, layout, coordinate, self.shape)
