"""The legal steps from one state of a tensor to another: one collective, or none.

In: placements per mesh dim, a goal, sizes. Out: `Step`. A step is legal if every state on the way is a spec of the same
global tensor:

    P -> R       all_reduce       over one mesh dim, or over several of one kind at once
    P -> S       reduce_scatter   the same; what the goal slices away on other mesh dims is not even reduced
    S -> R       all_gather       the same, also of different tensor dims
    S -> S'      all_to_all       one mesh dim, one tensor dim to another
    any -> any   exchange         any shards to any others, partial sums among them: everybody gets what it lacks
    R -> S       slice            nothing is sent, nor by the next two
    R -> P       partition        every rank holds v/n of a sum, or v of the rest
    S -> P(sum)  spread           every rank holds its shard, and zeros elsewhere

Where several mesh dims shard one tensor dim they nest, so that a mesh dim takes or gives up the innermost shard, or all
of a suffix at once; an exchange, and a shard that nests otherwise, are checked by counting elements, which needs sizes
in numbers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard, StridedShard
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.planner import exchange
from dtensor_compile.planner import step_costs as costs
from dtensor_compile.planner.lower_bound import fewest_sent
from dtensor_compile.planner.shard_intervals import CUTS, common, cuts_of, cutting, held, inner_cut, is_cut, length
from dtensor_compile.planner.step_costs import COLLECTIVES, StepKind, elements_sent, local_elements, local_sizes
from dtensor_compile.topology.network import Network

State = tuple[Placement, ...]

#: Mesh dims that change at once up to which all ways are tried; beyond, only those that merge as much as they can.
MOST_FREE = 3


@dataclass(frozen=True)
class Step:
    """One change of placements.

    Attributes:
        kind: what is called.
        mesh_dims: those whose ranks talk to each other; for a local step those that change.
        before, after: the whole spec.
        elements: elements that one rank sends; the busiest one, where they differ.
        seconds: estimated.
    """

    kind: StepKind
    mesh_dims: tuple[int, ...]
    before: State
    after: State
    elements: int = 0
    seconds: float = field(default=0.0, compare=False)

    @property
    def changed(self) -> tuple[int, ...]:
        return tuple(i for i, (a, b) in enumerate(zip(self.before, self.after)) if a != b)

    @property
    def sends(self) -> bool:
        return self.kind in COLLECTIVES

    def text(self, names: Sequence[str]) -> str:
        """As ``all_gather[dp,tp] S(0)S(0)->RR``, with these names of mesh dims."""
        before, after = (spec_text([state[i] for i in self.changed]) for state in (self.before, self.after))
        return f"{self.kind}[{','.join(names[i] for i in self.mesh_dims)}] {before}->{after}"

    def __str__(self) -> str:
        return self.text([str(i) for i in range(len(self.before))])


@dataclass(frozen=True)
class Problem:
    """What is asked for.

    Attributes:
        start, goal: specs, ``R`` on mesh dims of size 1.
        mesh_shape: sizes of the mesh dims.
        shape: global sizes; hints where they are symbolic.
        divisors: what each size is known to be a multiple of: itself where it is a number.
        itemsize: bytes of an element.
        network: the links.
        memory: elements that a plan may hold at once besides its input (`planner/memory.py`).
        detours: whether steps towards specs that neither end has are tried.
        most: elements that a path has to stay below.
        collectives: how many of them a path may have.
        end: where a path has to lead, while ways towards another goal are tried.
    """

    start: State
    goal: State
    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    divisors: tuple[int, ...]
    itemsize: int
    network: Network
    memory: float = math.inf
    detours: bool = False
    most: float = math.inf
    collectives: float = math.inf
    end: State | None = None

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """Tensor dims along which shards are worth a try: those of start and goal."""
        if self.detours:
            return tuple(range(len(self.shape)))
        return tuple(sorted({p.dim for p in (*self.start, *self.goal) if is_cut(p)}))

    @functools.cached_property
    def active(self) -> tuple[int, ...]:
        """Mesh dims that change, and those that cut a dim which they cut; with detours all."""
        if self.detours:
            return self.wide
        changed = {i for i, (a, b) in enumerate(zip(self.start, self.goal)) if a != b}
        cut = {p.dim for i in changed for p in (self.start[i], self.goal[i]) if is_cut(p)}
        more = {i for i, p in enumerate(self.start) if is_cut(p) and p.dim in cut}
        return tuple(sorted(changed | more))

    @property
    def free(self) -> bool:
        """Whether there are few enough ways to try them all."""
        return len(self.active) <= MOST_FREE

    @property
    def wide(self) -> tuple[int, ...]:
        """Mesh dims of more than one rank."""
        return tuple(i for i, n in enumerate(self.mesh_shape) if n > 1)

    @property
    def may_detour(self) -> bool:
        """Whether a way over a spec that neither end has may send less: where shards of two mesh dims may be uneven.

        What counts is the busiest rank, and over another spec its part may be a row less.
        """
        uneven = any(size % self.ranks(self.wide) for size in self.shape)
        return len(self.wide) == 2 and uneven and all(map(self.fixed, range(len(self.shape))))

    def fixed(self, dim: int) -> bool:
        """Whether the size of a tensor dim is a number."""
        return self.divisors[dim] == self.shape[dim]

    def even(self, dim: int, mesh_dims: Sequence[int]) -> bool:
        """Whether a tensor dim is a multiple of the ranks along these mesh dims, whatever its size."""
        return self.divisors[dim] % math.prod(self.mesh_shape[i] for i in mesh_dims) == 0

    def local(self, state: State) -> int:
        return local_elements(state, self.mesh_shape, self.shape)

    def may_end(self, state: State, elements: int, collectives: float) -> bool:
        """Whether a path over `state`, up to which it sends so many elements, can end, after so many more collectives,
        below `most`.
        """
        bound = fewest_sent(state, self.end or self.goal, self.mesh_shape, self.shape)
        # Each all-reduce of the rest may leave out the fraction of an element.
        return elements + bound - len(self.wide) < self.most if collectives > 0 else not bound

    def ranks(self, mesh_dims: Sequence[int]) -> int:
        return math.prod(self.mesh_shape[i] for i in mesh_dims)

    def step(self, kind: StepKind, mesh_dims: Sequence[int], before: State, after: State) -> Step:
        """A legal step with its cost."""
        n, copied, messages = self.ranks(mesh_dims), 1.0, None
        if kind == "exchange":
            counted = exchange.traffic(before, after, tuple(mesh_dims), self.mesh_shape, self.shape)
            assert counted is not None
            elements, messages = counted.elements, counted.partners
            copied = 2.0 * (self.local(before) + self.local(after))
        elif kind == "reduce_scatter":
            elements = elements_sent(kind, n, n * self.local(after))
            copied = n * self.local(after)
        elif kind == "all_to_all":
            sizes = local_sizes(before, self.mesh_shape, self.shape)
            target = after[mesh_dims[0]]
            assert isinstance(target, Shard)
            sizes[target.dim] = -(-sizes[target.dim] // n) * n
            elements, copied = elements_sent(kind, n, math.prod(sizes)), 2.0 * math.prod(sizes)
        else:
            elements, copied = elements_sent(kind, n, self.local(before)), self.local(after)
        time = costs.seconds(
            self.network, kind, mesh_dims, n, elements * self.itemsize, copied * self.itemsize, messages
        )
        return Step(kind, tuple(mesh_dims), before, after, elements, time)


def moves(problem: Problem, state: State, sent: int = 0, collectives: float = math.inf) -> Iterator[Step]:
    """Every step from `state` that may be part of a cheapest plan.

    Args:
        sent: elements that were sent on the way to `state`.
        collectives: how many may follow (where none, they may be among the steps: whoever asks passes them over).
    """
    yield from _towards(problem, state, collectives > 0)
    if problem.detours and collectives > 0:
        ops = tuple(dict.fromkeys(p for p in (*problem.start, *problem.goal) if isinstance(p, Partial)))
        most, end = problem.most - sent, problem.end or problem.goal
        yield from _detours(
            replace(problem, start=state, goal=state, memory=math.inf, most=most, collectives=collectives, end=end), ops
        )


@functools.lru_cache(maxsize=1 << 12)
def _detours(problem: Problem, partials: tuple[Partial, ...]) -> tuple[Step, ...]:
    """Steps from the start of `problem` towards every spec that its mesh dims may have; none that makes terms of a
    sum.
    """
    words = (Replicate(), *map(Shard, problem.dims), *partials)
    found: dict[Step, None] = {}
    for spec in itertools.product(words, repeat=len(problem.wide)):
        goal = changed(problem.start, dict(zip(problem.wide, spec)))
        found.update(dict.fromkeys(_towards(replace(problem, goal=goal), problem.start, True)))
    return tuple(step for step in found if step.kind not in ("partition", "spread"))


def _towards(problem: Problem, state: State, sending: bool) -> Iterator[Step]:
    """The steps that the goal of `problem` suggests."""
    if problem.free:
        yield from _singles(problem, state)
    if sending:
        yield from _merged(problem, state)
        yield from _exchanges(problem, state)
    cut = {i: b for i, (a, b) in enumerate(zip(state, problem.goal)) if isinstance(a, Replicate) and is_cut(b)}
    if len(cut) > 1 or not problem.free or any(isinstance(p, StridedShard) for p in cut.values()):
        for chosen in (cut, *({i: p} for i, p in cut.items())) if len(cut) > 1 else (cut,):
            after = changed(state, chosen)
            if chosen and narrows(problem, state, after):
                yield problem.step("slice", tuple(chosen), state, after)
    if not problem.free:
        for i, (a, b) in enumerate(zip(state, problem.goal)):
            if isinstance(b, Partial) and (isinstance(a, Replicate) or _spreads(problem, state, i)):
                yield problem.step(
                    "partition" if isinstance(a, Replicate) else "spread", (i,), state, changed(state, {i: b})
                )


def changed(state: State, new: Mapping[int, Placement]) -> State:
    """`state` with the placements of some mesh dims exchanged."""
    return tuple(new.get(i, p) for i, p in enumerate(state))


def innermost(state: State, mesh_dim: int) -> bool:
    """Whether no mesh dim to the right cuts what the shard of `mesh_dim` cuts."""
    p = state[mesh_dim]
    return isinstance(p, CUTS) and cutting(state, p.dim)[-1] == mesh_dim


def _spreads(problem: Problem, state: State, mesh_dim: int) -> bool:
    """Whether a shard may become a term of the sum that the goal has there, zeros around it.

    Not where there was none at the start: the terms of a replicated tensor are v/n, which programs see.
    """
    p = state[mesh_dim]
    if (
        not is_cut(problem.start[mesh_dim])
        or problem.goal[mesh_dim] != Partial("sum")
        or not innermost(state, mesh_dim)
    ):
        return False
    assert isinstance(p, CUTS)
    return type(p) is Shard or problem.fixed(p.dim)


def _singles(problem: Problem, state: State) -> Iterator[Step]:
    """One mesh dim, one placement: legal for all sizes."""
    for i in problem.active:
        source, goal = state[i], problem.goal[i]
        nested = {p.dim for p in state[i + 1 :] if is_cut(p)}
        shards: list[Placement] = [Shard(d) for d in problem.dims if d not in nested]

        def step(kind: StepKind, target: Placement) -> Step:
            return problem.step(kind, (i,), state, changed(state, {i: target}))  # noqa: B023 - called before the next i

        if isinstance(source, Partial):
            yield step("all_reduce", Replicate())
            for shard in shards:
                yield step("reduce_scatter", shard)
            for d in sorted(nested):
                around = cutting(state, d)
                if (
                    problem.fixed(d)
                    and problem.even(d, (*around, i))
                    and not any(isinstance(state[j], StridedShard) for j in around)
                ):
                    yield step("reduce_scatter", inner_cut(state, problem.mesh_shape, i, d))
        elif isinstance(source, CUTS) and source.dim not in nested:
            yield step("all_gather", Replicate())
            if _spreads(problem, state, i):
                yield step("spread", goal)
            if isinstance(source, Shard):
                for shard in shards:
                    if shard != source:
                        yield step("all_to_all", shard)
        elif isinstance(source, Replicate):
            for shard in shards:
                yield step("slice", shard)
            if isinstance(goal, StridedShard) and goal.dim not in nested:
                yield step("slice", goal)
            if isinstance(goal, Partial):
                yield step("partition", goal)


def _subsets(problem: Problem, mesh_dims: Sequence[int], *wholes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Two or more of `mesh_dims`; where there are too many, only `wholes`, and each alone."""
    if problem.free:
        for size in range(2, len(mesh_dims) + 1):
            yield from itertools.combinations(mesh_dims, size)
    else:
        yield from dict.fromkeys([tuple(whole) for whole in wholes if whole] + [(i,) for i in mesh_dims])


def _merged(problem: Problem, state: State) -> Iterator[Step]:
    """Several mesh dims at once, one kind of collective."""
    goal = problem.goal
    for op in dict.fromkeys(p.reduce_op for p in state if isinstance(p, Partial)):
        pending = [i for i, p in enumerate(state) if p == Partial(op) and goal[i] != p]
        for chosen in _subsets(problem, pending, [i for i in pending if isinstance(goal[i], Replicate)], pending):
            yield problem.step("all_reduce", chosen, state, changed(state, dict.fromkeys(chosen, Replicate())))
        scattered = [i for i in pending if is_cut(goal[i])]
        cut = {i: b for i, (a, b) in enumerate(zip(state, goal)) if isinstance(a, Replicate) and is_cut(b)}
        for chosen in {*_subsets(problem, scattered, scattered), *((i,) for i in scattered)}:
            for also in (cut, {}) if cut else ({},):
                after = changed(state, {i: goal[i] for i in (*chosen, *also)})
                alone = len(chosen) == 1 and not also and type(goal[chosen[0]]) is Shard
                if not (alone and problem.free) and narrows(problem, state, after, merged=not alone):
                    yield problem.step("reduce_scatter", chosen, state, after)
    sharded = [i for i, p in enumerate(state) if is_cut(p) and goal[i] != p]
    for chosen in _subsets(problem, sharded, [i for i in sharded if isinstance(goal[i], Replicate)], sharded):
        after = changed(state, dict.fromkeys(chosen, Replicate()))
        if gathers(problem, state, after, chosen):
            yield problem.step("all_gather", chosen, state, after)


def _exchanges(problem: Problem, state: State) -> Iterator[Step]:
    """All that is cut otherwise in the goal, in one all-to-all; sums whose goal is a shard among it."""
    goal = problem.goal
    differ = [i for i, (a, b) in enumerate(zip(state, goal)) if a != b and not isinstance(b, Partial)]
    shards = [i for i in differ if not isinstance(state[i], Partial)]
    sums = [i for i in differ if isinstance(state[i], Partial) and is_cut(goal[i])]
    kinds = {p for i in sums if isinstance(p := state[i], Partial)}
    one_kind = len(kinds) == 1 and all(p.reduce_op in exchange.REDUCES for p in kinds)
    for chosen in (shards, shards + sums) if one_kind else (shards,):
        after = changed(state, {i: goal[i] for i in chosen})
        dims = exchange.changed_dims(state, after, problem.mesh_shape)
        if not all(map(problem.fixed, dims)):
            continue
        if problem.detours:  # counting who sends what takes longer than the rest
            least = fewest_sent(state, after, problem.mesh_shape, problem.shape)
            if not problem.may_end(after, least, problem.collectives - 1):
                continue
        # Those that talk in any case, those that hold what may be missing too, and all that may serve.
        talk = {i for i in chosen if isinstance(state[i], (Partial, *CUTS))}
        hold = talk | {i for i in problem.active if is_cut(p := state[i]) and p.dim in dims}
        for group in dict.fromkeys(tuple(sorted(ranks)) for ranks in (talk, hold, hold | set(chosen))):
            if not any(is_cut(state[i]) for i in group):
                continue
            counted = exchange.traffic(state, after, group, problem.mesh_shape, problem.shape)
            if counted is not None and counted.elements:
                yield problem.step("exchange", group, state, after)


def narrows(problem: Problem, before: State, after: State, merged: bool = False) -> bool:
    """Whether every rank already holds, in full or as a term of a sum, what it is to hold.

    Args:
        merged: the step cuts by several mesh dims at once, which for symbolic sizes has to be even.
    """
    for d in exchange.changed_dims(before, after, problem.mesh_shape):
        old, new = cuts_of(before, problem.mesh_shape, d), cuts_of(after, problem.mesh_shape, d)
        if problem.fixed(d):
            if not _contains(old, new, problem.shape[d]):
                return False
        elif (
            new[: len(old)] != old
            or any(pieces > 1 for _, _, pieces in new)
            or merged
            and not problem.even(d, cutting(after, d))
        ):
            return False
    return True


@functools.lru_cache(maxsize=1 << 14)
def _contains(old: tuple[tuple[int, int, int], ...], new: tuple[tuple[int, int, int], ...], size: int) -> bool:
    sizes = {i: n for i, n, _ in (*old, *new)}
    for place in itertools.product(*(range(n) for n in sizes.values())):
        at = dict(zip(sizes, place))
        has, needs = (held(tuple((n, pieces, at[i]) for i, n, pieces in cuts), size) for cuts in (old, new))
        if length(common(needs, has)) != length(needs):
            return False
    return True


def gathers(problem: Problem, before: State, after: State, mesh_dims: Sequence[int]) -> bool:
    """Whether the shards along `mesh_dims` together are what each rank is to hold."""
    for d in exchange.changed_dims(before, after, problem.mesh_shape):
        old, new = cuts_of(before, problem.mesh_shape, d), cuts_of(after, problem.mesh_shape, d)
        if not new and problem.fixed(d):
            continue
        if old[: len(new)] != new:
            return False
        plain = all(pieces == 1 for _, _, pieces in old)
        if not (plain and (problem.fixed(d) or len(mesh_dims) == 1 or problem.even(d, cutting(before, d)))):
            if len(mesh_dims) > 1 or not all(pieces == 1 for _, _, pieces in old[: len(new)]):
                return False
    return True
