"""Plans of redistributions from one mesh to another, with or without common ranks, and their execution.

In: a spec on a source mesh, one on a target mesh, the global shape. Out: an `Across`: steps on the source mesh, if a
sum is better reduced there, then one all-to-all among the ranks of both meshes in which every rank receives the
elements that it lacks:

    S(0) on ranks 0,1 -> S(0) on ranks 2,3      0 sends its half to 2, 1 to 3
    S(0) on ranks 0,1 -> R on ranks 1,2         0 sends its half to 1 and 2, 1 sends its own to 2 alone
    P(sum) on 0,1 -> S(0) on 2,3                2 and 3 get their half of both terms and add them up
    P(sum) on 0,1 -> R on 2,3                   reduce_scatter on 0,1, then both halves to 2 and 3

No rank receives an element (of a partial sum: a term) twice, or one that it has. Ranks that hold the same block share
the load (`planner/exchange.py`). The text of a slice of a mesh stands for all such slices, which hold the same tensor:
each of their ranks is a holder, or gets its part.

Plans depend on specs, sizes and the two meshes alone: all ranks of both choose the same one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard
from dtensor_compile.errors import PlanError
from dtensor_compile.ir.mesh import MeshLayout
from dtensor_compile.ir.spec import placement_text, spec_text
from dtensor_compile.ops.expand import RankPlace, canonical, expand
from dtensor_compile.ops.rearrange import Boxes, Held, exchange_boxes, take_part
from dtensor_compile.planner import shard_intervals as shards
from dtensor_compile.planner.exchange import REDUCES, overlap, serve
from dtensor_compile.planner.memory import exchanged, peak_elements
from dtensor_compile.planner.problem import State, Step
from dtensor_compile.planner.search import cheapest_plan, checked, collectives, largest_target, over_budget
from dtensor_compile.planner.step_costs import local_elements


@dataclass(frozen=True, eq=False)
class Exchange:
    """The exchange of a plan. Members are the ranks of both meshes in ascending order.

    Attributes:
        ranks: global ranks of the members.
        has, needs: intervals that each holds before and after, per tensor dim; None if it is not part of the mesh.
        terms: index of the term of a sum that each holds.
        sent: ``[p, q]``: elements from member p to member q.
        split, shares: as in `dtensor_compile.planner.exchange.ExchangeTable`.
        reduce_op: reduction of the terms; empty if there is only one.
    """

    ranks: tuple[int, ...]
    has: tuple[Held | None, ...]
    needs: tuple[Held | None, ...]
    terms: tuple[int, ...]
    sent: np.ndarray
    split: int
    shares: Mapping[tuple[int, int], tuple[int, int]]
    reduce_op: str

    @functools.cached_property
    def away(self) -> np.ndarray:
        """`sent` without the elements that members keep."""
        away = self.sent.copy()
        np.fill_diagonal(away, 0)
        return away

    @property
    def sends(self) -> bool:
        return bool(self.away.any())

    @property
    def elements(self) -> int:
        """Elements that the busiest member sends."""
        return int(self.away.sum(1).max(initial=0))

    @property
    def held(self) -> int:
        """Elements that one member holds at once besides its input: send and receive buffers, and its result."""
        results = [
            math.prod(shards.length(parts) for parts in needs.values()) for needs in self.needs if needs is not None
        ]
        if not self.sends:
            return max(results)
        return exchanged(self.elements, max(self.terms) + 1, max(results)).most

    def part(self, sender: int, receiver: int) -> Held:
        """The part that `sender` sends to `receiver`, per tensor dim."""
        has, needs = self.has[sender], self.needs[receiver]
        assert has is not None and needs is not None
        parts = {d: shards.common(has[d], needs[d]) for d in has}
        if (sender, receiver) in self.shares:
            parts[self.split] = shards.section(parts[self.split], *self.shares[sender, receiver])
        return parts


@dataclass(frozen=True, eq=False)
class Across:
    """A plan.

    Attributes:
        steps: on the source mesh, from the source spec to `middle`.
        middle, goal: specs before the exchange, on the source mesh, and after it, on the target mesh.
        exchange: among the ranks of both meshes; sends nothing if every rank has its part.
        held: elements that one rank holds at once besides its input; the maximum over ranks.
    """

    steps: tuple[Step, ...]
    middle: State
    goal: State
    exchange: Exchange
    held: int

    @property
    def elements(self) -> int:
        """Elements that one rank sends; those of the busiest one in each step, if they differ."""
        return sum(step.elements for step in self.steps) + self.exchange.elements

    @property
    def collectives(self) -> int:
        return collectives(self.steps) + self.exchange.sends

    @property
    def total(self) -> int:
        """Elements that all ranks send together, those of a step as if each sent as much as the busiest."""
        source = sum(held is not None for held in self.exchange.has)
        return source * sum(step.elements for step in self.steps) + int(self.exchange.away.sum())

    def texts(self, source: MeshLayout) -> tuple[str, ...]:
        """The steps, as ``exchange[0,1,2] S(0)->R`` with the ranks of both meshes."""
        names = [source.dim_name(i) for i in range(len(source.dims))]
        ranks = ",".join(map(str, self.exchange.ranks))
        kind = f"exchange[{ranks}]" if self.exchange.sends else "keep"
        return (*(step.text(names) for step in self.steps), f"{kind} {spec_text(self.middle)}->{spec_text(self.goal)}")


@functools.lru_cache(maxsize=4096)
def plan_across(
    source: str,
    target: str,
    source_mesh: MeshLayout,
    target_mesh: MeshLayout,
    shape: tuple[int, ...],
    itemsize: int = 4,
    memory: int | None = None,
) -> Across:
    """The plan in which the busiest rank sends the fewest bytes, then all together, then with the fewest collectives
    and steps.

    Args:
        source, target: specs on the two meshes.
        shape: elements per dim of the global tensor.
        itemsize: bytes of an element.
        memory: bytes that one rank may hold at once besides its input; None for no bound.

    Raises:
        MemoryBudgetError: every plan holds more than `memory`.
        PlanError: a placement names a dim that the tensor does not have, a spec does not fit its mesh, or the target is
            partial.
    """
    start, goal = checked(source, source_mesh.shape, shape), checked(target, target_mesh.shape, shape)
    partial = next((p for p in goal if isinstance(p, Partial)), None)
    if partial is not None:
        legal = spec_text([Replicate() if isinstance(p, Partial) else p for p in goal])
        raise PlanError(
            f"redistribute from {source} on {source_mesh} to {target} on {target_mesh} not supported: nothing leads to "
            f"{placement_text(partial)} on another mesh; the nearest legal target is {legal}"
        )
    found = list(_candidates(start, goal, source_mesh, target_mesh, shape, itemsize))
    fitting = found if memory is None else [this for this in found if this.held * itemsize <= memory]
    if memory is None or fitting:
        return min(fitting, key=_cost)

    def leads(other: State) -> bool:
        return any(
            this.held * itemsize <= memory
            for this in _candidates(start, other, source_mesh, target_mesh, shape, itemsize)
        )

    within = largest_target(
        goal, None, len(shape), lambda other: local_elements(other, target_mesh.shape, shape), leads
    )
    best = min(found, key=_cost)
    raise over_budget(
        f"from {source} on {source_mesh} to {target} on {target_mesh}", "; ".join(best.texts(source_mesh)), memory,
        best.held * itemsize, min(this.held for this in found) * itemsize,
        f"redistribute to {spec_text(within)}, the largest within the bound" if within else "use a larger mesh",
    )  # fmt: skip


def _cost(this: Across) -> tuple[int, ...]:
    return this.elements, this.total, this.collectives, len(this.steps)


def _candidates(
    start: State, goal: State, source_mesh: MeshLayout, target_mesh: MeshLayout, shape: tuple[int, ...], itemsize: int
) -> Iterator[Across]:
    for middle in _middles(start, len(shape)):
        steps = cheapest_plan(spec_text(start), spec_text(middle), source_mesh.shape, shape, itemsize)
        exchange = _exchange(middle, goal, source_mesh, target_mesh, shape)
        before = peak_elements(steps, source_mesh.shape, shape)
        yield Across(steps, middle, goal, exchange, max(before.most, before.kept + exchange.held))


def _middles(start: State, ndim: int) -> Iterator[State]:
    """Specs in which a tensor may leave the source mesh: as it is, and reduced."""
    ops = {p.reduce_op for p in start if isinstance(p, Partial)}
    if not ops or len(ops) == 1 and ops <= {*REDUCES}:
        yield start
    if ops:
        for reduced in (Replicate(), *map(Shard, range(ndim))):
            yield tuple(reduced if isinstance(p, Partial) else p for p in start)


@functools.lru_cache(maxsize=4096)
def _exchange(before: State, after: State, source: MeshLayout, target: MeshLayout, shape: tuple[int, ...]) -> Exchange:
    ranks = tuple(sorted({*source.ranks, *target.ranks}))
    has, needs = _held(before, source, ranks, shape), _held(after, target, ranks, shape)
    common = np.outer([h is not None for h in has], [n is not None for n in needs]).astype(np.int64)
    overlaps = {}
    for d in range(len(shape)):
        overlaps[d], _ = overlap([h[d] if h else () for h in has], [n[d] if n else () for n in needs])
        common *= overlaps[d]
    summed = [i for i, p in enumerate(before) if isinstance(p, Partial)]
    places = [source.coordinate(rank) for rank in ranks]
    pending = [tuple(place[i] for i in summed) if place is not None else () for place in places]
    number = {
        term: k for k, term in enumerate(sorted({term for term, place in zip(pending, places) if place is not None}))
    }
    terms = tuple(number.get(term, 0) for term in pending)
    blocks: dict[object, list[int]] = {}
    for member, block in enumerate(has):
        if block is not None:
            blocks.setdefault((terms[member], tuple(block.items())), []).append(member)
    split = max(overlaps, key=lambda d: int(overlaps[d].max()), default=0)
    sent, shares = serve(common, list(blocks.values()), overlaps.get(split, common))
    op = next((p.reduce_op for p in before if isinstance(p, Partial)), "")
    return Exchange(ranks, has, needs, terms, sent, split, shares, op)


def _held(
    state: Sequence[Placement], mesh: MeshLayout, ranks: Sequence[int], shape: Sequence[int]
) -> tuple[Held | None, ...]:
    found: list[Held | None] = []
    for rank in ranks:
        at = mesh.coordinate(rank)
        cut = (
            None
            if at is None
            else {d: shards.intervals(state, mesh.shape, d, size, at) for d, size in enumerate(shape)}
        )
        found.append(cut)
    return tuple(found)


def expand_across(
    x: torch.Tensor,
    this: Across,
    rank: int,
    source: MeshLayout,
    shape: Sequence[int],
    group_name: Callable[[tuple[int, ...]], str],
    union_name: Callable[[tuple[int, ...]], str],
) -> torch.Tensor:
    """Carries out a plan on one rank.

    Args:
        x: its local tensor in the source spec; of any shape if it is not part of the source mesh.
        rank: its global rank.
        shape: global shape.
        group_name: process group along dims of the source mesh, by name.
        union_name: name of the process group over the ranks of both meshes.

    Returns:
        the local tensor in the target spec, contiguous; `absent` if the rank is not part of the target mesh.
    """
    if source.coordinate(rank) is not None:
        x = expand(x, this.steps, RankPlace(source, rank, group_name), shape)
    exchange = this.exchange
    if rank not in exchange.ranks:
        return absent(x, shape)
    me = exchange.ranks.index(rank)
    has, needs = exchange.has[me], exchange.needs[me]
    if exchange.sends:
        return _exchanged(x, exchange, me, shape, union_name(exchange.ranks))
    if needs is None:
        return absent(x, shape)
    if has is None:
        return x.new_empty([shards.length(needs[d]) for d in range(len(shape))])  # it needs no element
    return canonical(take_part(x, needs, has))


def absent(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The local tensor of a rank that is not part of the mesh, as torch makes it: of shape ``(0,)``, and a zero without
    dims.
    """
    return (
        x.new_empty(0) if shape else torch.full((), 0, dtype=x.dtype, device=x.device)
    )  # Inductor takes no new_zeros here


def _exchanged(x: torch.Tensor, exchange: Exchange, me: int, shape: Sequence[int], group: str) -> torch.Tensor:
    needs = exchange.needs[me]
    if x.is_complex():  # gloo does not exchange complex numbers
        real = _exchanged(torch.view_as_real(x.resolve_conj()), exchange, me, (*shape, 2), group)
        return absent(x, shape) if needs is None else torch.view_as_complex(real.contiguous())
    outgoing = {int(q): exchange.part(me, int(q)) for q in np.flatnonzero(exchange.sent[me])}
    incoming = {int(p): exchange.part(int(p), me) for p in np.flatnonzero(exchange.sent[:, me])}
    boxes = Boxes(outgoing, incoming, exchange.has[me] or {}, needs or {}, me, exchange.terms)
    order = range(len(exchange.ranks))
    out = exchange_boxes(x, boxes, order, group, (0,) if needs is None else shape, exchange.reduce_op)
    return canonical(out) if needs is not None or shape else absent(x, shape)
