"""Propagates placements from a few tensors of a program to all of them, to a fixed point.

Input: the operators of a program over tensors of global shape (`compat.dtensor.record`), and the mesh axes that shard
some of the tensors. Output: the mesh axes that shard each dim of every tensor.

Correctness: a sharding determines where data is, not what it is. Any choice computes the same numbers, as each operator
gets its arguments with the placements that its rule requires; a good choice communicates less. No result here can be
wrong, and shardings set by the user are never changed.

Method: a factor of an operator (`compat.dtensor.rules.factors`) is one loop with the dims that it runs over. An axis
that shards one of these dims is passed on to the others, from arguments to results and back, until nothing changes:

1. by the user's order: marks with priority 0 spread before those with priority 1;
2. then operators that pass an axis on for free, before those whose result becomes partial;
3. then by cost: if an axis could shard two factors of one operator, it shards the one with more bytes.

A *closed* dim takes no further axes (the dims of tensors that the user marked, unless listed as open); other dims are
open. An axis shards only one dim of a tensor, and only one that it divides.

    w1: (tp, -)   marked         x: (dp, -, -)   marked
    h = linear(x, w1)            h: (dp, -, tp)  from both
    g = linear(x, w3)            g: (dp, -, tp)  as h * silu(g) is sharded     w3: (tp, -)  from g
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtensor_compile.compat.dtensor.record import Operator, RecordedProgram
from dtensor_compile.compat.dtensor.rules.factors import Factor, tensor_leaves
from dtensor_compile.spmd.partition_spec import Axes

#: The factors of an operator that an axis of that many devices can shard.
Factors = Callable[[Operator, int], Sequence[Factor]]


@dataclass
class Sharding:
    """The mesh axes of one tensor, per dim, during propagation.

    Attributes:
        shape: global shape.
        cuts: per dim the axes that shard it, in order.
        closed: per dim, whether it takes no further axes.
        level: per axis, the priority of the mark from which it came.
    """

    shape: tuple[int, ...]
    bytes: int
    cuts: list[tuple[int, ...]]
    closed: list[bool]
    level: dict[int, int] = field(default_factory=dict)

    @property
    def axes(self) -> Axes:
        return tuple(self.cuts)

    def dim_of(self, axis: int) -> int | None:
        return next((dim for dim, entry in enumerate(self.cuts) if axis in entry), None)


@dataclass(frozen=True)
class SpreadMark:
    """The sharding of a tensor as marked by the user.

    Attributes:
        axes: per dim the axes that shard it.
        open_dims: dims that may take more axes.
        priority: 0 spreads first.
    """

    axes: Axes
    open_dims: tuple[int, ...] = ()
    priority: int = 0


@dataclass(frozen=True)
class _Use:
    """An operator with its tensors, for the propagation."""

    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    factors: Mapping[int, Sequence[Factor]]  # by size of the axis

    def members(self, factor: Factor) -> list[tuple[Sharding, int]]:
        both = zip((*self.inputs, *self.outputs), (*factor.inputs, *factor.outputs))
        return [(sharding, dim) for sharding, dim in both if dim is not None]


def propagate(
    program: RecordedProgram,
    marks: Sequence[tuple[torch.Tensor, SpreadMark]],
    mesh_shape: Sequence[int],
    factors: Factors,
) -> dict[int, Sharding]:
    """The sharding of each tensor of the program (by its ``id``) that follows from the marks."""
    shardings: dict[int, Sharding] = {}
    for tensor, mark in marks:
        closed = [dim not in mark.open_dims for dim in range(tensor.ndim)]
        shardings[id(tensor)] = _sharding(tensor, [() for _ in range(tensor.ndim)], closed)
    sizes = sorted({size for size in mesh_shape if size > 1})
    uses = [_use(operator, shardings, sizes, factors) for operator in program.operators]
    of: dict[int, list[_Use]] = {}
    for use in uses:
        for sharding in (*use.inputs, *use.outputs):
            of.setdefault(id(sharding), []).append(use)
    for priority in sorted({mark.priority for _, mark in marks}):
        for tensor, mark in marks:
            if mark.priority == priority:
                this = shardings[id(tensor)]
                this.cuts = list(mark.axes)
                this.level = {axis: priority for entry in mark.axes for axis in entry}
        for sums in (False, True):
            _spread(uses, of, mesh_shape, priority, sums)
    return shardings


def _sharding(tensor: torch.Tensor, cuts: list[tuple[int, ...]], closed: list[bool]) -> Sharding:
    return Sharding(tuple(tensor.shape), tensor.numel() * tensor.element_size(), cuts, closed)


def _use(operator: Operator, shardings: dict[int, Sharding], sizes: Sequence[int], factors: Factors) -> _Use:
    def of(tensors: Iterable[torch.Tensor]) -> tuple[Sharding, ...]:
        return tuple(
            shardings.setdefault(id(t), _sharding(t, [() for _ in range(t.ndim)], [False] * t.ndim)) for t in tensors
        )

    inputs = of(tensor_leaves((operator.args, operator.kwargs)))
    return _Use(inputs, of(operator.results), {size: factors(operator, size) for size in sizes} if inputs else {})


def _spread(
    uses: Sequence[_Use], of: Mapping[int, Sequence[_Use]], mesh_shape: Sequence[int], level: int, sums: bool
) -> None:
    """Passes axes on along factors until nothing changes; along factors that make results partial only with `sums`."""
    waiting, queued = deque(uses), {id(use) for use in uses}
    while waiting:
        use = waiting.popleft()
        queued.discard(id(use))
        for axis, size in enumerate(mesh_shape):
            if size == 1:
                continue
            for changed in _give_on(use, axis, mesh_shape, level, sums):
                for next_use in of[id(changed)]:
                    if id(next_use) not in queued:
                        queued.add(id(next_use))
                        waiting.append(next_use)


def _give_on(use: _Use, axis: int, mesh_shape: Sequence[int], level: int, sums: bool) -> list[Sharding]:
    """Passes an axis on to the other dims of the factor that it shards already; returns the tensors that changed."""
    best: tuple[int, int] | None = None
    chosen: list[tuple[Sharding, int]] = []
    for factor in use.factors.get(mesh_shape[axis], ()):
        if factor.summed and not sums:
            continue
        members = use.members(factor)
        cut = [sharding for sharding, dim in members if axis in sharding.cuts[dim]]
        if not cut:
            continue
        strength = (-min(sharding.level[axis] for sharding in cut), sum(sharding.bytes for sharding in cut))
        if best is None or strength > best:
            best, chosen = strength, members
    if not chosen:
        return []
    order = next(sharding.cuts[dim] for sharding, dim in chosen if axis in sharding.cuts[dim])
    changed = []
    for sharding, dim in chosen:
        if sharding.closed[dim] or sharding.dim_of(axis) is not None:
            continue
        entry = _inserted(sharding.cuts[dim], axis, order)
        if sharding.shape[dim] % math.prod(mesh_shape[a] for a in entry):
            continue
        sharding.cuts[dim] = entry
        sharding.level[axis] = level
        changed.append(sharding)
    return changed


def _inserted(entry: tuple[int, ...], axis: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """`entry` with `axis` inserted before those that come after it in `order`."""
    later = set(order[order.index(axis) + 1 :])
    place = next((i for i, other in enumerate(entry) if other in later), len(entry))
    return (*entry[:place], axis, *entry[place:])
