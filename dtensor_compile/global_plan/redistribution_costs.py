"""Seconds and bytes of redistributions between placements of evenly sharded tensors.

The planner searches a redistribution once for each pattern of placements and each magnitude of size; those of other
tensors are the same steps with elements in proportion, which is what the planner's counts are for even shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch.distributed.tensor import Partial, Replicate

from dtensor_compile.bounded_cache import BoundedCache
from dtensor_compile.compat.dtensor.rules.operator_strategies import Placements
from dtensor_compile.compat.dtensor.specs import StridedShard
from dtensor_compile.errors import PlanError
from dtensor_compile.global_plan.candidates import sharded_dim
from dtensor_compile.ir.spec import placement_text
from dtensor_compile.planner.search import Step, cheapest_plan
from dtensor_compile.planner.step_costs import seconds
from dtensor_compile.topology.network import Network

#: Bytes of the tensors for which redistributions are searched: of those up to the first, where latency decides, and of
#: all others.
_MAGNITUDES = (1 << 16, 1 << 26)
_ITEMSIZE = 2


class RedistributionCost(NamedTuple):
    """Seconds; bytes that the busiest rank sends."""

    seconds: float
    bytes: float


_NONE = RedistributionCost(math.inf, math.inf)


class RedistributionCosts:
    """Costs over one mesh.

    Placements have numbers here (`codes`), so that costs of many are looked up at once.

    Args:
        mesh_shape: its sizes.
        network: its links.
    """

    def __init__(self, mesh_shape: Sequence[int], network: Network) -> None:
        self.mesh_shape, self.network = tuple(mesh_shape), network
        self.placements: list[Placements] = []
        self._codes: dict[Placements, int] = {}
        self._found: dict[int, dict[tuple[int, int], RedistributionCost]] = {}
        self._patterns: dict[tuple[int, int], tuple[str, str, int]] = {}
        self._plans: BoundedCache[object, tuple[tuple[Step, ...], int] | None] = BoundedCache(1 << 14)

    def codes(self, placements: Iterable[Placements]) -> np.ndarray:
        """The number of each of these placements."""
        return np.array([self._code(p) for p in placements], dtype=np.int64)

    def _code(self, placements: Placements) -> int:
        code = self._codes.setdefault(placements, len(self.placements))
        if code == len(self.placements):
            self.placements.append(placements)
        return code

    def between(self, have: np.ndarray, want: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes of redistributions of a global tensor of `size` bytes, ``[have, want]``; infinite if there
        is no path."""
        known = self._found.setdefault(size, {})
        sources, rows = np.unique(have, return_inverse=True)
        targets, columns = np.unique(want, return_inverse=True)
        found = np.zeros((len(sources), len(targets), 2))
        for i, source in enumerate(sources.tolist()):
            for j, target in enumerate(targets.tolist()):
                if source != target:
                    if (source, target) not in known:
                        known[source, target] = self._of_plan(source, target, size)
                    found[i, j] = known[source, target]
        spread = found[np.ix_(rows, columns)]
        return spread[..., 0], spread[..., 1]

    def unmoved(self, have: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `between`, of a tensor that cannot be redistributed."""
        same = have[:, None] == want[None, :]
        return np.where(same, 0.0, math.inf), np.zeros(same.shape)

    def _of_plan(self, source: int, target: int, size: int) -> RedistributionCost:
        pairs = zip(self.placements[source], self.placements[target])
        if any(after.is_partial() and before != after and not before.is_replicate() for before, after in pairs):
            return _NONE  # torch refuses to make partial what is sharded
        magnitude = _MAGNITUDES[size > _MAGNITUDES[0]]
        pattern = self._patterns.get((source, target))
        if pattern is None:
            labels: dict[object, int] = {}
            before, after = (self.placements[code] for code in (source, target))
            words = ["".join(_word(p, labels) for p in placements) for placements in (before, after)]
            pattern = self._patterns[source, target] = words[0], words[1], len(labels)
        key = pattern, magnitude
        if key not in self._plans:
            self._plans[key] = self._searched(*pattern, magnitude)
        planned = self._plans[key]
        if planned is None:
            return _NONE
        steps, searched = planned
        took = sent = 0.0
        for step in steps:
            bytes_sent = step.elements * _ITEMSIZE * size / searched
            ranks = math.prod(self.mesh_shape[i] for i in step.mesh_dims)
            took += seconds(self.network, step.kind, step.mesh_dims, ranks, bytes_sent, 0.0)
            sent += bytes_sent
        return RedistributionCost(took, sent)

    def _searched(self, source: str, target: str, dims: int, magnitude: int) -> tuple[tuple[Step, ...], int] | None:
        """The planner's steps for a tensor of about `magnitude` bytes, and its bytes."""
        side = math.prod(self.mesh_shape)
        shape = (*[side] * dims, max(1, magnitude // (_ITEMSIZE * side**dims)))
        try:
            return cheapest_plan(source, target, self.mesh_shape, shape, _ITEMSIZE, network=self.network), (
                _ITEMSIZE * math.prod(shape)
            )
        except PlanError:
            return None


def _word(placement: object, labels: dict[object, int]) -> str:
    """The text of a placement whose tensor dims are numbered in the order in which they occur.

    A dim that is sharded in another order than left to right counts as a dim of its own.
    """
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        return placement_text(placement) if type(placement) is Partial else "P(sum)"
    label = placement_text(placement) if isinstance(placement, StridedShard) else sharded_dim(placement)  # type: ignore[arg-type]
    return f"S({labels.setdefault(label, len(labels))})"
