"""The strategies of each call over a whole mesh, by DTensor's rules.

The strategies of an operator over the mesh dims are combined; a combination is left out if a dim of a tensor would be
sharded unevenly. If the tensors that come in can be sharded in another order than left to right (a view made them so),
DTensor is asked whether the operator takes every tensor that has this factor in that order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from dtensor_compile.bounded_cache import BoundedCache
from dtensor_compile.compat.dtensor.rules.factors import tensor_leaves
from dtensor_compile.compat.dtensor.rules.operator_strategies import (
    DimStrategies,
    Placements,
    Strategy,
    asked,
    strategies_on_one_dim,
)
from dtensor_compile.compat.dtensor.specs import StridedShard
from dtensor_compile.compat.dtensor.step_record import StepCall, makes_alias
from dtensor_compile.global_plan.equal_calls import facts_of_call
from dtensor_compile.planner.shard_intervals import is_cut

#: Operators that give their input another shape without an alias.
_RESHAPES = frozenset({"aten::_unsafe_view", "aten::reshape"})


class Candidates:
    """Strategies over a mesh, whose dims have names if there are several; calls with equal facts share them.

    Attributes:
        without_rule: operators for which DTensor has no rule: they run on replicated tensors.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        self.mesh, self.shape = mesh, tuple(mesh.shape)
        self.without_rule: set[str] = set()
        self._dims = [mesh] if mesh.ndim == 1 else [mesh[name] for name in names]
        self._single: BoundedCache[object, DimStrategies] = BoundedCache(1 << 14)
        self._orders: BoundedCache[object, bool] = BoundedCache(1 << 14)
        self._whole: BoundedCache[object, tuple[Strategy, ...]] = BoundedCache(1 << 14)

    def of_tensor(self, tensor: torch.Tensor, shards: bool = True) -> tuple[Placements, ...]:
        """Placements that a parameter or an input can have: every dim of the mesh replicates or shards evenly."""
        options: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.ndim if shards else 0))]
        every = itertools.product(options, repeat=len(self.shape))
        return tuple(placements for placements in every if self._even(tensor.shape, placements))

    def of_call(self, call: StepCall, given: Sequence[tuple[Placements, ...]]) -> tuple[Strategy, ...]:
        """The strategies of a call.

        Args:
            given: placements that each of its tensors can come with.
        """
        key = facts_of_call(call), tuple(given)
        if key not in self._whole:
            self._whole[key] = self._combined(call, given)
        return self._whole[key]

    def _combined(self, call: StepCall, given: Sequence[tuple[Placements, ...]]) -> tuple[Strategy, ...]:
        tensors, results = tensor_leaves((call.args, call.kwargs)), tensor_leaves(call.result)
        if not tensors:  # each rank makes what it needs
            return tuple(Strategy((), (placements,) * len(results)) for placements in self._of_all(results))
        views = len(tensors) == 1 and is_view(call)
        found: dict[Strategy, None] = {}
        for combination in itertools.product(*(self.on_dim(call, i).found for i in range(len(self.shape)))):
            for factors in itertools.product(*(_orders(s, i, given) for i, s in enumerate(combination))):
                inputs = _over_mesh([s.inputs for s in combination], factors)
                if not all(self._even(x.shape, p) for x, p in zip(tensors, inputs)):
                    continue
                if call.cuts_once and any(map(_cut_twice, inputs)):
                    continue
                made = asked(call, self.mesh, inputs) if views else None
                if made is None and (views or not self._takes(call, combination, factors)):
                    continue
                outputs = made.outputs if made else _over_mesh([s.outputs for s in combination], factors)
                if all(self._even(x.shape, p) for x, p in zip(results, outputs)):
                    found[Strategy(inputs, outputs)] = None
        return tuple(found)

    def _takes(self, call: StepCall, combination: Sequence[Strategy], factors: Sequence[int | None]) -> bool:
        """Whether the operator takes shards in these orders; asked for each mesh dim by itself."""
        for i, (strategy, factor) in enumerate(zip(combination, factors)):
            if factor is not None:
                key = i, facts_of_call(call), strategy, factor
                if key not in self._orders:
                    ordered = _over_mesh([strategy.inputs], [factor]), _over_mesh([strategy.outputs], [factor])
                    self._orders[key] = asked(call, self._dims[i], ordered[0]) == Strategy(*ordered)
                if not self._orders[key]:
                    return False
        return True

    def _of_all(self, tensors: Sequence[torch.Tensor]) -> list[Placements]:
        """Placements that all of these tensors can have."""
        possible = [set(self.of_tensor(tensor)) for tensor in tensors]
        return [placements for placements in self.of_tensor(tensors[0]) if all(placements in p for p in possible)]

    def on_dim(self, call: StepCall, mesh_dim: int) -> DimStrategies:
        """What the rule of a call answers for one dim of the mesh."""
        key = self.shape[mesh_dim], facts_of_call(call)
        if key not in self._single:
            self._single[key] = strategies_on_one_dim(call, self._dims[mesh_dim])
        if not self._single[key].has_rule:
            self.without_rule.add(call.name)
        return self._single[key]

    def _even(self, shape: Sequence[int], placements: Placements) -> bool:
        """Whether all ranks have shards of one size."""
        return all(
            size % pieces == 0 for size, pieces in zip(shape, pieces_of_dims(len(shape), placements, self.shape))
        )


def is_view(call: StepCall) -> bool:
    """Whether a call gives the memory of its input other sizes or strides."""
    return call.op._schema.name in _RESHAPES or makes_alias(call.op)


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dim that a placement shards, in whatever order; None if it shards none."""
    return placement.dim if is_cut(placement) else None


def pieces_of_dims(ndim: int, placements: Placements, mesh_shape: Sequence[int]) -> list[int]:
    """Into how many shards each tensor dim is cut."""
    return [
        math.prod(n for placement, n in zip(placements, mesh_shape) if sharded_dim(placement) == dim)
        for dim in range(ndim)
    ]


def _cut_twice(placements: Placements) -> bool:
    """Whether a tensor dim is sharded over several mesh dims."""
    dims = [sharded_dim(placement) for placement in placements if sharded_dim(placement) is not None]
    return len(set(dims)) < len(dims)


def _orders(strategy: Strategy, mesh_dim: int, given: Sequence[tuple[Placements, ...]]) -> list[int | None]:
    """Split factors with which what this strategy shards over `mesh_dim` can come; None for left to right."""
    found: dict[int | None, None] = {None: None}
    for (wanted,), possible in zip(strategy.inputs, given):
        for placements in possible if sharded_dim(wanted) is not None else ():
            placement = placements[mesh_dim]
            if isinstance(placement, StridedShard) and placement.dim == sharded_dim(wanted):
                found[int(placement.split_factor)] = None
    return list(found)


def _over_mesh(by_dim: Sequence[tuple[Placements, ...]], factors: Sequence[int | None]) -> tuple[Placements, ...]:
    """Placements of each tensor over the mesh, from those over each of its dims."""
    return tuple(
        tuple(_ordered(placement, factor) for (placement,), factor in zip(of_tensor, factors))
        for of_tensor in zip(*by_dim)
    )


def _ordered(placement: Placement, factor: int | None) -> Placement:
    dim = sharded_dim(placement)
    return placement if dim is None or factor is None else StridedShard(dim, split_factor=factor)
