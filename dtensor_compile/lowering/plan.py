"""Which collectives lead from one spec to another.

In: two specs on one mesh and the global shape. Out: a tuple of `Step`, each of which changes the placement on one mesh dim:

    P(op) -> R      all_reduce       sends 2 (n-1)/n of the local tensor
    P(op) -> S(d)   reduce_scatter   (n-1)/n
    S(d)  -> R      all_gather       (n-1) times
    S(d)  -> S(e)   all_to_all       (n-1)/n
    R     -> S(d)   slice            nothing
    _S(d,f) <-> R   all_gather, slice, as S(d) <-> R
    R     -> P(op)  partition        nothing

(n: size of the mesh dim; ring algorithms, the same counts as in NCCL's documentation of its performance figures.)

Why a plan is right: where several mesh dims shard one tensor dim, they nest from left to right, so a mesh dim may take or give
up a shard of tensor dim d only while no mesh dim to its right shards d. Every step obeys that, so every state on the way is a
valid spec of the same global tensor. The cheapest path over these states is found with Dijkstra's algorithm.

Why a plan is never worse than torch's own: cheapest in time may mean a collective more for fewer bytes, or bytes more for one
collective less. torch's greedy path is one of the paths here (with its all_to_all, which on CPU is an all_gather there), so paths
that have more collectives or more bytes than that one are left out, and at least that one remains.

Plans depend on the global shape and the mesh alone, never on the rank, so that all ranks choose the same one.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dtensor_compile.capture.spec import parse_spec, placement_text, spec_text
from dtensor_compile.compat.dtensor import Partial, Placement, Replicate, Shard, StridedShard
from dtensor_compile.errors import PlanError

StepKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "partition"]

#: Kinds of steps that send something.
COLLECTIVES = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all"})

#: Placements that cut a tensor dim.
CUTS = (Shard, StridedShard)

#: What one more collective costs, in bytes: about what a 1 Gbit/s link carries in the 100 microseconds that a collective takes to
#: start. It keeps a plan from trading a few bytes for another collective.
LATENCY_BYTES = 16 * 1024

State = tuple[Placement, ...]


@dataclass(frozen=True)
class Step:
    """One change of placement on one mesh dim.

    Attributes:
        kind: what is called.
        mesh_dim: the mesh dim whose placement changes.
        source, target: placements before and after.
        elements: elements that one rank sends.
    """

    kind: StepKind
    mesh_dim: int
    source: Placement
    target: Placement
    elements: int

    def __str__(self) -> str:
        return f"{self.kind}[{self.mesh_dim}] {placement_text(self.source)}->{placement_text(self.target)}"


def local_elements(placements: Sequence[Placement], mesh_shape: Sequence[int], shape: Sequence[int]) -> int:
    """Elements of the largest local tensor under these placements (uneven shards count as the padded ones)."""
    sizes = list(shape)
    for placement, n in zip(placements, mesh_shape):
        _cut(sizes, placement, n)
    return math.prod(sizes)


def _cut(sizes: list[int], placement: Placement, n: int) -> None:
    """Sizes of the largest shard in place of those of the whole."""
    if isinstance(placement, Shard):
        sizes[placement.dim] = -(-sizes[placement.dim] // n)
    elif isinstance(placement, StridedShard):
        # Each of the pieces is cut, as torch.chunk does it: full pieces, then the rest.
        size, factor = sizes[placement.dim], int(placement.split_factor)
        piece = -(-size // factor)
        sizes[placement.dim] = sum(-(-min(piece, max(0, size - piece * k)) // n) for k in range(factor))


def elements_sent(kind: StepKind, n: int, local: int) -> int:
    """Elements that one rank sends for a collective over `n` ranks on a local input of `local` elements."""
    if kind == "all_reduce":
        return 2 * (n - 1) * local // n
    if kind in ("reduce_scatter", "all_to_all"):
        return (n - 1) * local // n
    if kind == "all_gather":
        return (n - 1) * local
    return 0


def _elements_sent(kind: StepKind, state: State, mesh_dim: int, target: Placement, mesh_shape: Sequence[int], shape: Sequence[int]) -> int:
    """Elements that one rank sends for a step from `state`; what is scattered unevenly is padded first, and counts padded."""
    n, sizes = mesh_shape[mesh_dim], list(shape)
    for placement, m in zip(state, mesh_shape):
        _cut(sizes, placement, m)
    if isinstance(target, Shard):
        sizes[target.dim] = -(-sizes[target.dim] // n) * n
    return elements_sent(kind, n, math.prod(sizes))


#: Reduce ops for which there are values on each rank that reduce to a given one, exactly: v/n for a sum, v for the others.
_PARTITIONS = ("sum", "avg", "min", "max")


def _commute(placements: Sequence[Placement]) -> bool:
    """Whether the reductions that `placements` wait for may be done in any order: one kind, or sums and averages."""
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(ops) <= 1 or ops <= {"sum", "avg"}


def _moves(state: State, goal: State, mesh_shape: Sequence[int], ndim: int) -> Iterator[tuple[int, StepKind, Placement]]:
    """Every legal change of one placement: mesh dim, kind, new placement."""
    for i, source in enumerate(state):
        if mesh_shape[i] == 1:
            continue
        nested = {p.dim for p in state[i + 1 :] if isinstance(p, CUTS)}
        shards = [Shard(d) for d in range(ndim) if d not in nested]
        if isinstance(source, Partial):
            yield i, "all_reduce", Replicate()
            yield from ((i, "reduce_scatter", s) for s in shards)
        elif isinstance(source, Shard) and source.dim not in nested:
            yield i, "all_gather", Replicate()
            yield from ((i, "all_to_all", s) for s in shards if s != source)
        elif isinstance(source, StridedShard) and source.dim not in nested:
            yield i, "all_gather", Replicate()
        elif isinstance(source, Replicate):
            yield from ((i, "slice", s) for s in shards)
            if isinstance(goal[i], StridedShard) and goal[i].dim not in nested:
                yield i, "slice", goal[i]
            if isinstance(goal[i], Partial) and _commute((*state, goal[i])):
                yield i, "partition", goal[i]


def _torch_path(start: State, goal: State) -> Iterator[tuple[int, Placement]]:
    """torch's greedy choice, mesh dim and new placement of each step: from the innermost mesh dim outwards what can change at once
    (a shard that would nest otherwise in the goal is gathered), then from the outermost inwards what is left.
    """
    state = list(start)
    if any(isinstance(p, Shard) for p in start):
        for i in reversed(range(len(state))):
            target = goal[i]
            if isinstance(target, Shard):
                outer = [[p == target for p in placements[:i]] for placements in (state, goal)]
                if outer[0] != outer[1]:
                    target = Replicate()
            if state[i] != target:
                yield i, target
                state[i] = target
    for i, target in enumerate(goal):
        if state[i] != target:
            yield i, target


def _kind(source: Placement, target: Placement) -> StepKind:
    if isinstance(source, Partial):
        return "reduce_scatter" if isinstance(target, Shard) else "all_reduce"
    if isinstance(source, Shard):
        return "all_to_all" if isinstance(target, Shard) else "all_gather"
    return "slice" if isinstance(target, Shard) else "partition"


def _limits(start: State, goal: State, mesh_shape: Sequence[int], shape: Sequence[int]) -> tuple[float, float]:
    """Collectives and elements of torch's greedy path; none where shards are strided, because it is wrong there."""
    if any(isinstance(p, StridedShard) for p in (*start, *goal)):
        return math.inf, math.inf
    state, count, elements = start, 0, 0
    for i, target in _torch_path(start, goal):
        kind = _kind(state[i], target)
        count += kind in COLLECTIVES
        elements += _elements_sent(kind, state, i, target, mesh_shape, shape)
        state = (*state[:i], target, *state[i + 1 :])
    return count, elements


def plan(source: str, target: str, mesh_shape: Sequence[int], shape: Sequence[int], itemsize: int = 4) -> tuple[Step, ...]:
    """The cheapest steps from spec `source` to spec `target` for a global tensor of `shape` (elements per dim).

    An empty tuple means that the local tensor already is what the target spec asks for.

    Raises:
        PlanError: a placement names a dim that the tensor does not have, the specs do not fit the mesh, or nothing leads
            from the one to the other (a shard cannot become partial, nor one partial another; nor does torch do that).
    """
    return _plan(source, target, tuple(mesh_shape), tuple(shape), itemsize)


@functools.lru_cache(maxsize=65536)
def _plan(
    source: str, target: str, mesh_shape: tuple[int, ...], shape: tuple[int, ...], itemsize: int
) -> tuple[Step, ...]:
    start, goal = parse_spec(source), parse_spec(target)
    for text, placements in ((source, start), (target, goal)):
        if len(placements) != len(mesh_shape):
            raise PlanError(f"spec {text} has {len(placements)} placements, but the mesh has {len(mesh_shape)} dims")
        for p in placements:
            if isinstance(p, CUTS) and p.dim >= len(shape):
                raise PlanError(f"{placement_text(p)} in spec {text}: the tensor has {len(shape)} dims, {shape}")

    def trivial(placements: State) -> State:
        # On a mesh dim of size 1 every placement means the same.
        return tuple(Replicate() if n == 1 else p for p, n in zip(placements, mesh_shape))

    start, goal = trivial(start), trivial(goal)
    if start == goal:
        return ()
    for a, b in zip(start, goal):
        if isinstance(b, Partial) and a != b and not (isinstance(a, Replicate) and b.reduce_op in _PARTITIONS):
            raise PlanError(f"redistribute from {source} to {target} not supported: nothing leads from {placement_text(a)} to {placement_text(b)}")
    for placements in (start, goal):
        if not _commute(placements):
            raise PlanError(f"spec {spec_text(placements)} mixes reductions whose order matters")

    # Dijkstra's algorithm within the limits: a path to a state is kept unless another is at most as dear, with at most as many
    # collectives and at most as many elements. Ties are broken by order of discovery, which is the same on every rank.
    most_collectives, most_elements = _limits(start, goal, mesh_shape, shape)
    order = itertools.count()
    queue: list[tuple[float, int, State, tuple[Step, ...], int, int]] = [(0.0, next(order), start, (), 0, 0)]
    done: dict[State, list[tuple[int, int]]] = {}
    while queue:
        cost, _, state, steps, count, elements = heapq.heappop(queue)
        if state == goal:
            return steps
        kept = done.setdefault(state, [])
        if any(c <= count and e <= elements for c, e in kept):
            continue
        kept.append((count, elements))
        local = local_elements(state, mesh_shape, shape)
        for i, kind, placement in _moves(state, goal, mesh_shape, len(shape)):
            sent = _elements_sent(kind, state, i, placement, mesh_shape, shape)
            after = count + (kind in COLLECTIVES), elements + sent
            if after[0] > most_collectives or after[1] > most_elements:
                continue
            price = sent * itemsize + (LATENCY_BYTES if kind in COLLECTIVES else 0)
            price += local * itemsize * 1e-3 + 1e-3  # a local copy costs little, but not nothing
            step = Step(kind, i, state[i], placement, sent)
            successor = (*state[:i], placement, *state[i + 1 :])
            heapq.heappush(queue, (cost + price, next(order), successor, (*steps, step), *after))
    raise AssertionError(f"{source}->{target}: torch's path is not among the legal ones")


def bytes_sent(steps: Sequence[Step], itemsize: int) -> int:
    """Bytes that one rank sends for the plan."""
    return sum(step.elements for step in steps) * itemsize


def collectives(steps: Sequence[Step]) -> int:
    """Number of collectives in the plan."""
    return sum(step.kind in COLLECTIVES for step in steps)
