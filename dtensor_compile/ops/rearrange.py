"""Execution of steps over several mesh dims, or between shards that nest in any order, on a local tensor.

In: the local tensor of this rank under the spec before a step. Out: that under the spec after it. One functional
collective (or none) between two rearrangements. If sizes are even and shards nest from left to right, a rearrangement
is one permutation:

    all_gather over (dp, tp) of S(0)S(1)    (dp, tp, rows, cols) -> (dp, rows, tp, cols), read as (dp*rows, tp*cols)

Else it slices and concatenates along the intervals that each rank holds (`planner/shard_intervals.py`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dtensor_compile.compat.aot.symbolic.shapes import is_multiple
from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.dtensor.specs import Partial, Placement, StridedShard
from dtensor_compile.planner.exchange import changed_dims, table
from dtensor_compile.planner.problem import Step
from dtensor_compile.planner.shard_intervals import CUTS, Intervals, common, cutting, intervals, length, within

if TYPE_CHECKING:
    from dtensor_compile.ops.expand import RankPlace

_c10d = torch.ops._c10d_functional

#: The intervals that a rank holds of each tensor dim whose sharding a step changes.
Held = dict[int, Intervals]

_ADD: dict[str, Callable[..., torch.Tensor]] = {"sum": operator.add, "min": torch.minimum, "max": torch.maximum}


def rearrange(x: torch.Tensor, step: Step, place: RankPlace, shape: Sequence[Any]) -> torch.Tensor:
    """Carries out a step that `expand` does not handle itself."""
    rearrangement = _Rearrangement(step, place, shape)
    if step.kind == "exchange":
        return rearrangement.exchange(x)
    if step.kind == "all_gather":
        return rearrangement.gather_evenly(x) if rearrangement.even else rearrangement.gather(x)
    if step.kind == "reduce_scatter":
        return rearrangement.scatter_evenly(x) if rearrangement.even else rearrangement.scatter(x)
    assert step.kind in ("slice", "spread"), step.kind
    return rearrangement.slice(x) if step.kind == "slice" else rearrangement.spread(x)


class _Rearrangement:
    """One step on one rank."""

    def __init__(self, step: Step, place: RankPlace, shape: Sequence[Any]) -> None:
        self.step, self.place, self.shape = step, place, shape
        self.mesh_shape = place.layout.shape
        self.dims = changed_dims(step.before, step.after, self.mesh_shape)
        self.n = math.prod(self.mesh_shape[i] for i in step.mesh_dims)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group, row-major in their coordinates."""
        return self.place.layout.group_over(self.place.rank, self.step.mesh_dims)

    @functools.cached_property
    def order(self) -> list[int]:
        """The index in `ranks` of each rank of the process group: a group over several mesh dims is in order of
        rank."""
        return (
            sorted(range(self.n), key=self.ranks.__getitem__) if len(self.step.mesh_dims) > 1 else list(range(self.n))
        )

    @property
    def group(self) -> str:
        return self.place.group_name(self.step.mesh_dims)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        found = self.place.layout.coordinate(rank)
        assert found is not None
        return found

    def held(self, placements: Sequence[Placement], rank: int) -> Held:
        at = self.coordinate(rank)
        return {d: intervals(placements, self.mesh_shape, d, self.shape[d], at) for d in self.dims}

    @functools.cached_property
    def even(self) -> bool:
        """Whether all shards of the dims that change nest from left to right and are even."""
        for state in (self.step.before, self.step.after):
            for d in self.dims:
                around = cutting(state, d)
                if any(isinstance(state[i], StridedShard) for i in around):
                    return False
                if not is_multiple(self.shape[d], math.prod(self.mesh_shape[i] for i in around)):
                    return False
        for d in self.dims:
            few, many = sorted((cutting(self.step.before, d), cutting(self.step.after, d)), key=len)
            if many[: len(few)] != few:
                return False
        return True

    # ---- nothing is sent -------------------------------------------------------------------------------------------

    def slice(self, x: torch.Tensor) -> torch.Tensor:
        if all(isinstance(self.shape[d], int) for d in self.dims):
            return take_part(
                x, self.held(self.step.after, self.place.rank), self.held(self.step.before, self.place.rank)
            )
        from dtensor_compile.ops.expand import shard_range

        for i in self.step.changed:  # from left to right, each cuts what the others left
            placement = self.step.after[i]
            assert isinstance(placement, CUTS)
            start, size = shard_range(x.size(placement.dim), self.mesh_shape[i], self.place.coordinate[i])
            x = x.narrow(placement.dim, start, size)
        return x.clone()

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        has, whole = self.held(self.step.before, self.place.rank), self.held(self.step.after, self.place.rank)
        for d in self.dims:
            parts, position, taken = [], 0, 0
            for start, size in [*within(has[d], whole[d]), (length(whole[d]), 0)]:
                parts.append(x.new_zeros(*x.shape[:d], start - position, *x.shape[d + 1 :]))
                parts.append(x.narrow(d, taken, size))
                position, taken = start + size, taken + size
            x = torch.cat(parts, d)
        return x

    # ---- by intervals ----------------------------------------------------------------------------------------------

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_complex():  # gloo does not exchange complex numbers
            return torch.view_as_complex(self.exchange(torch.view_as_real(x.resolve_conj())).contiguous())
        step, me = self.step, self.ranks.index(self.place.rank)
        sizes = tuple(size if isinstance(size, int) else 0 for size in self.shape)
        who = table(step.before, step.after, step.mesh_dims, self.mesh_shape, sizes, self.place.coordinate)
        has = [self.held(step.before, rank) for rank in self.ranks]
        needs = [self.held(step.after, rank) for rank in self.ranks]
        outgoing = {q: who.part(me, q, has[me], needs[q]) for q in range(self.n) if me in who.senders[q]}
        incoming = {p: who.part(p, me, has[p], needs[me]) for p in who.senders[me]}
        boxes = Boxes(outgoing, incoming, has[me], needs[me], me, who.terms)
        pending = [p for p, q in zip(step.before, step.after) if isinstance(p, Partial) and p != q]
        return exchange_boxes(x, boxes, self.order, self.group, x.shape, pending[0].reduce_op if pending else "")

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        has = [self.held(self.step.before, rank) for rank in self.ranks]
        x, largest = self._padded(x, has)
        chunks = (
            _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), self.n, self.group))
            .view(self.n, *largest)
            .unbind(0)
        )
        parts = []
        for chunk, k in zip(chunks, self.order):
            for d, held in has[k].items():
                chunk = chunk.narrow(d, 0, length(held))
            parts.append((chunk, has[k]))
        return _assemble(parts, self.held(self.step.after, self.place.rank), self.dims)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        has = self.held(self.step.before, self.place.rank)
        needs = [self.held(self.step.after, rank) for rank in self.ranks]
        chunks = [self._padded(_take(x, needs[k], has), needs)[0] for k in self.order]
        x = _c10d.reduce_scatter_tensor(
            torch.cat([c.unsqueeze(0) for c in chunks]), self._reduce_op(), self.n, self.group
        )
        x = _c10d.wait_tensor(x).squeeze(0)
        for d, held in needs[self.ranks.index(self.place.rank)].items():
            x = x.narrow(d, 0, length(held))
        return x.contiguous()

    def _padded(self, x: torch.Tensor, of_group: Sequence[Held]) -> tuple[torch.Tensor, list[Any]]:
        """`x` as large as the largest of its group, and that shape."""
        largest = [max(length(h[d]) for h in of_group) if d in self.dims else size for d, size in enumerate(x.shape)]
        widths = [w for d in reversed(range(x.dim())) for w in (0, largest[d] - x.size(d) if d in self.dims else 0)]
        return (torch.constant_pad_nd(x, widths) if any(widths) else x), largest

    def _reduce_op(self) -> str:
        pending = self.step.before[self.step.mesh_dims[0]]
        assert isinstance(pending, Partial)
        return pending.reduce_op

    # ---- even shards, one permutation ------------------------------------------------------------------------------

    def gather_evenly(self, x: torch.Tensor) -> torch.Tensor:
        dims, local = self.step.mesh_dims, list(x.shape)
        x = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), self.n, self.group)).view(self.n, *local)
        x = _reordered(x, [self.order.index(k) for k in range(self.n)])
        x = x.view(*(self.mesh_shape[i] for i in dims), *local)
        order, shape = [], []
        for d, size in enumerate(local):
            new = [k for k, i in enumerate(dims) if self._cuts(self.step.before, i, d)]
            order += [*new, len(dims) + d]
            shape.append(math.prod(self.mesh_shape[dims[k]] for k in new) * size)
        return x.permute(order).reshape(shape).contiguous()

    def scatter_evenly(self, x: torch.Tensor) -> torch.Tensor:
        new = [i for i in self.step.changed if isinstance(self.step.after[i], CUTS)]
        shape: list[Any] = []
        position: dict[int, int] = {}
        rest = []
        for d, size in enumerate(x.shape):
            for i in new:
                if self._cuts(self.step.after, i, d):
                    position[i] = len(shape)
                    shape.append(self.mesh_shape[i])
                    size = size // self.mesh_shape[i]
            rest.append(len(shape))
            shape.append(size)
        sliced = [i for i in new if i not in self.step.mesh_dims]
        x = x.reshape(shape).permute(*(position[i] for i in (*sliced, *self.step.mesh_dims)), *rest)
        for i in sliced:
            x = x.select(0, self.place.coordinate[i])
        local = [shape[k] for k in rest]
        x = _reordered(x.reshape(self.n, *local), self.order).contiguous()
        return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, self._reduce_op(), self.n, self.group)).view(local)

    @staticmethod
    def _cuts(state: Sequence[Placement], mesh_dim: int, dim: int) -> bool:
        placement = state[mesh_dim]
        return isinstance(placement, CUTS) and placement.dim == dim


@dataclass(frozen=True)
class Boxes:
    """The parts that one member of a group sends and receives in an exchange.

    Attributes:
        outgoing, incoming: parts by member; those of its own number are kept.
        has, needs: intervals that it holds before and after, of each sharded tensor dim.
        me: its index in the group.
        terms: per member, the index of the term of the sum that it holds.
    """

    outgoing: Mapping[int, Held]
    incoming: Mapping[int, Held]
    has: Held
    needs: Held
    me: int
    terms: Sequence[int]


def exchange_boxes(
    x: torch.Tensor, boxes: Boxes, order: Sequence[int], group: str, shape: Sequence[Any], reduce_op: str = ""
) -> torch.Tensor:
    """Runs one all-to-all and assembles the received parts; terms of a sum are added up in their order.

    Args:
        x: the tensor that this member holds.
        order: the member that each rank of the process group is.
        shape: sizes of the tensor dims that are not cut.
        reduce_op: reduction of the terms; empty if there is only one.
    """
    me, dims, order = boxes.me, tuple(boxes.needs), list(order)

    def block_shape(parts: Held) -> list[Any]:
        return [length(parts[d]) if d in parts else size for d, size in enumerate(shape)]

    blocks = {q: _take(x, parts, boxes.has) for q, parts in boxes.outgoing.items()}
    outgoing = [blocks[q].reshape(-1) if q in blocks and q != me else x.new_empty(0) for q in order]
    shapes = {p: block_shape(parts) for p, parts in boxes.incoming.items()}
    splits = [math.prod(shapes[p]) if p in shapes and p != me else 0 for p in order]
    if any(splits) and not blocks.keys() - {me} and compat_mesh.is_simulated(group):
        # The group of a simulated job receives where something is sent only: an element to itself, which nobody reads.
        outgoing[order.index(me)], splits[order.index(me)] = x.new_empty(1), 1
    flat = torch.cat(outgoing) if len(outgoing) > 1 else outgoing[0]
    received = _c10d.wait_tensor(_c10d.all_to_all_single(flat, splits, [part.numel() for part in outgoing], group))
    pieces = dict(zip(order, received.split(splits)))
    terms: dict[int, list[tuple[torch.Tensor, Held]]] = {}
    for p, parts in boxes.incoming.items():
        block = blocks[me] if p == me else pieces[p].view(shapes[p])
        terms.setdefault(boxes.terms[p], []).append((block, parts))
    if not terms:
        return received.view(block_shape(boxes.needs))  # empty
    if set(boxes.incoming) == {me}:
        # Nothing came. The result is not the input, and needs the collective all the same: others wait for this rank.
        kept = _assemble(terms[boxes.terms[me]], boxes.needs, dims)
        return torch.cat([kept.reshape(-1), received]).view(kept.shape)
    summed = [_assemble(found, boxes.needs, dims) for _, found in sorted(terms.items())]
    return functools.reduce(_ADD[reduce_op], summed) if reduce_op else summed[0]


def take_part(x: torch.Tensor, wanted: Held, has: Held) -> torch.Tensor:
    """A copy of the part `wanted` of the tensor that this rank holds."""
    return _take(x, wanted, has).clone()


def _reordered(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Chunks of dim 0 in this order: only meshes whose ranks do not grow with their coordinates have another one."""
    return x if list(order) == list(range(len(order))) else torch.cat([x[k : k + 1] for k in order])


def _take(x: torch.Tensor, wanted: Held, has: Held) -> torch.Tensor:
    """The part `wanted` of `x`, which holds `has`."""
    for d, parts in wanted.items():
        if parts == has[d]:
            continue
        pieces = [x.narrow(d, start, size) for start, size in within(parts, has[d])] or [x.narrow(d, 0, 0)]
        x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, d)
    return x


def _assemble(parts: Sequence[tuple[torch.Tensor, Held]], wanted: Held, dims: Sequence[int]) -> torch.Tensor:
    """The tensor that holds `wanted`, put together from disjoint parts of it, one tensor dim after the other."""
    if not dims:
        return parts[0][0]
    d, *others = dims
    edges = sorted({edge for _, held in parts for start, end in held[d] for edge in (start, end)})
    runs: list[tuple[list[int], list[tuple[int, int]]]] = []
    for start, end in zip(edges, edges[1:]):
        covering = [k for k, (_, held) in enumerate(parts) if common(((start, end),), held[d])]
        if not covering:
            continue
        if runs and runs[-1][0] == covering:
            runs[-1][1].append((start, end))
        else:
            runs.append((covering, [(start, end)]))
    cells = []
    for covering, segments in runs:
        chosen = []
        for k in covering:
            x, held = parts[k]
            chosen.append((_take(x, {d: tuple(segments)}, {d: held[d]}), held))
        cells.append(_assemble(chosen, wanted, others))
    if not cells:
        return parts[0][0].new_empty(
            [length(wanted[k]) if k in wanted else size for k, size in enumerate(parts[0][0].shape)]
        )
    return cells[0] if len(cells) == 1 else torch.cat(cells, d)
