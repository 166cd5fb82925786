"""Placements of all tensors of a program from those of a few, to a fixed point.

Comes in: the operators of a program over tensors of global shape (`compat.dtensor.record`), and the mesh axes that cut
some of the tensors. Goes out: the mesh axes that cut each dim of every tensor.

What makes it right: a sharding says where data is and not what it is. Any choice computes the same numbers, as each
operator gets its arguments where its rule wants them; a good choice moves less. So nothing here can make a wrong
result, and what the user has said is never changed.

How. A factor of an operator (`compat.dtensor.factors`) is one loop with the dims that it runs over. An axis that cuts
one of these dims is given to the others, from arguments to results and back, until nothing changes:

1. by the user's order: what is marked with priority 0 spreads before anything that is marked with 1;
2. then operators that pass an axis on for free, before those that owe a sum for it;
3. then by cost: where an axis could cut two factors of one operator, it cuts that which holds more bytes.

A *closed* dim takes no axis but those it has (the dims of what the user marked, unless they are named as open); other
dims are open. An axis cuts a tensor once, and only a dim that it divides.

    w1: (tp, -)   marked         x: (dp, -, -)   marked
    h = linear(x, w1)            h: (dp, -, tp)  from both
    g = linear(x, w3)            g: (dp, -, tp)  as h * silu(g) is cut     w3: (tp, -)  from g
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtensor_compile.compat.dtensor.factors import Factor, tensor_leaves
from dtensor_compile.compat.dtensor.record import Operator, RecordedProgram
from dtensor_compile.spmd.partition_spec import Axes

#: The factors of an operator that can be cut by an axis of that many devices.
Factors = Callable[[Operator, int], Sequence[Factor]]


@dataclass
class Sharding:
    """The mesh axes of one tensor, per dim, while they are found.

    Attributes:
        shape: global shape.
        cuts: per dim the axes that cut it, in order.
        closed: per dim, whether it takes no more.
        level: per axis, at which of the user's priorities it came.
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
    """What the user said of a tensor.

    Attributes:
        axes: per dim the axes that cut it.
        open_dims: dims that may take more axes.
        priority: 0 spreads first.
    """

    axes: Axes
    open_dims: tuple[int, ...] = ()
    priority: int = 0


@dataclass(frozen=True)
class _Use:
    """An operator with its tensors, as the propagation sees it."""

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
    """The sharding of each tensor of the program (by its ``id``) that follows from the marked ones."""
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
    """Gives axes on along the factors of operators until nothing changes; factors that owe a sum only with `sums`."""
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
    """Cuts with an axis what has the factor that it cuts already; the tensors that changed."""
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
    """`entry` with `axis` before those that come after it in `order`."""
    later = set(order[order.index(axis) + 1 :])
    place = next((i for i, other in enumerate(entry) if other in later), len(entry))
    return (*entry[:place], axis, *entry[place:])
