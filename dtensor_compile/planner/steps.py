"""The legal steps from one state of a tensor to another: one collective, or none.

In: placements per mesh dim, a goal, sizes. Out: `Step`. A step is legal if every state on the way is a spec of the same
global tensor:

    P -> R       all_reduce       over one mesh dim, or over several of one kind at once
    P -> S       reduce_scatter   the same; elements that the goal slices away on other mesh dims are not reduced
    S -> R       all_gather       the same, also of different tensor dims
    S -> S'      all_to_all       one mesh dim, one tensor dim to another
    any -> any   exchange         any shards to any others, including partial sums: every rank gets what it lacks
    R -> S       slice            nothing is sent, nor by the next two
    R -> P       partition        every rank holds v/n of a sum, or v of the rest
    S -> P(sum)  spread           every rank holds its shard, and zeros elsewhere

If several mesh dims shard one tensor dim they nest, so that a step adds or removes the innermost shard, or a suffix of
shards at once; an exchange, and a shard that nests differently, are checked by counting elements, which needs integer
sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard, StridedShard
from dtensor_compile.planner import exchange
from dtensor_compile.planner.lower_bound import sent_lower_bound
from dtensor_compile.planner.problem import Problem, State, Step, changed
from dtensor_compile.planner.shard_intervals import (
    CUTS,
    common,
    cuts_of,
    cutting,
    held_intervals,
    inner_cut,
    is_cut,
    length,
)
from dtensor_compile.planner.step_costs import StepKind


def legal_steps(problem: Problem, state: State, sent: int = 0, collectives: float = math.inf) -> Iterator[Step]:
    """All steps from `state` that may be part of a cheapest plan.

    Args:
        sent: elements sent on the way to `state`.
        collectives: number of collectives that may follow (if 0, steps may include some, which the caller skips).
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
    """Steps from the start of `problem` towards every spec that its mesh dims may have; except steps to a new
    partial.
    """
    words = (Replicate(), *map(Shard, problem.dims), *partials)
    found: dict[Step, None] = {}
    for spec in itertools.product(words, repeat=len(problem.wide)):
        goal = changed(problem.start, dict(zip(problem.wide, spec)))
        found.update(dict.fromkeys(_towards(replace(problem, goal=goal), problem.start, True)))
    return tuple(step for step in found if step.kind not in ("partition", "spread"))


def _towards(problem: Problem, state: State, sending: bool) -> Iterator[Step]:
    """The steps towards the goal of `problem`."""
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


def innermost(state: State, mesh_dim: int) -> bool:
    """Whether no mesh dim to the right shards the same tensor dim as `mesh_dim`."""
    p = state[mesh_dim]
    return isinstance(p, CUTS) and cutting(state, p.dim)[-1] == mesh_dim


def _spreads(problem: Problem, state: State, mesh_dim: int) -> bool:
    """Whether a shard may become a term of the goal's partial sum, padded with zeros.

    Not if the start has no shard there: the terms of a replicated tensor are v/n, which programs can observe.
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
    """Steps of one mesh dim and one placement, which are legal for all sizes."""
    for i in problem.active:
        for kind, target in _changes_of(problem, state, i):
            yield problem.step(kind, (i,), state, changed(state, {i: target}))


def _changes_of(problem: Problem, state: State, i: int) -> Iterator[tuple[StepKind, Placement]]:
    """The new placements that one mesh dim may get, with the kinds of steps."""
    source, goal = state[i], problem.goal[i]
    nested = {p.dim for p in state[i + 1 :] if is_cut(p)}
    shards = [Shard(d) for d in problem.dims if d not in nested]
    if isinstance(source, Partial):
        yield "all_reduce", Replicate()
        yield from (("reduce_scatter", shard) for shard in shards)
        yield from (
            ("reduce_scatter", cut) for d in sorted(nested) if (cut := _inside(problem, state, i, d)) is not None
        )
    elif isinstance(source, CUTS) and source.dim not in nested:
        yield "all_gather", Replicate()
        if _spreads(problem, state, i):
            yield "spread", goal
        if isinstance(source, Shard):
            yield from (("all_to_all", shard) for shard in shards if shard != source)
    elif isinstance(source, Replicate):
        yield from (("slice", shard) for shard in shards)
        if isinstance(goal, StridedShard) and goal.dim not in nested:
            yield "slice", goal
        if isinstance(goal, Partial):
            yield "partition", goal


def _inside(problem: Problem, state: State, i: int, dim: int) -> Placement | None:
    """The placement with which mesh dim `i` shards inside of mesh dims to its right; None if shards would be uneven, or
    are strided.
    """
    around = cutting(state, dim)
    if not problem.fixed(dim) or not problem.even(dim, (*around, i)):
        return None
    if any(isinstance(state[j], StridedShard) for j in around):
        return None
    return inner_cut(state, problem.mesh_shape, i, dim)


def _subsets(problem: Problem, mesh_dims: Sequence[int], *wholes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Subsets of two or more of `mesh_dims`; if there are too many, only `wholes`, and each alone."""
    if problem.free:
        for size in range(2, len(mesh_dims) + 1):
            yield from itertools.combinations(mesh_dims, size)
    else:
        yield from dict.fromkeys([tuple(whole) for whole in wholes if whole] + [(i,) for i in mesh_dims])


def _merged(problem: Problem, state: State) -> Iterator[Step]:
    """Steps of several mesh dims at once, by one kind of collective."""
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
    """Steps that change all shards that differ from the goal in one all-to-all, including partial sums whose goal is a
    shard.
    """
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
        if problem.detours:  # counting traffic takes longer than the rest
            bound = sent_lower_bound(state, after, problem.mesh_shape, problem.shape)
            if not problem.may_end(after, bound, problem.collectives - 1):
                continue
        # Mesh dims that communicate in any case, those that may also hold missing elements, and all that may serve.
        talk = {i for i in chosen if isinstance(state[i], (Partial, *CUTS))}
        hold = talk | {i for i in problem.active if is_cut(p := state[i]) and p.dim in dims}
        for group in dict.fromkeys(tuple(sorted(ranks)) for ranks in (talk, hold, hold | set(chosen))):
            if not any(is_cut(state[i]) for i in group):
                continue
            counted = exchange.traffic(state, after, group, problem.mesh_shape, problem.shape)
            if counted is not None and counted.elements:
                yield problem.step("exchange", group, state, after)


def narrows(problem: Problem, before: State, after: State, merged: bool = False) -> bool:
    """Whether every rank already holds all elements of its part in `after`, in full or as a term of a sum.

    Args:
        merged: whether the step shards by several mesh dims at once, which has to be even for symbolic sizes.
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
        has, needs = (held_intervals(tuple((n, pieces, at[i]) for i, n, pieces in cuts), size) for cuts in (old, new))
        if length(common(needs, has)) != length(needs):
            return False
    return True


def gathers(problem: Problem, before: State, after: State, mesh_dims: Sequence[int]) -> bool:
    """Whether the shards along `mesh_dims` together are the part of each rank in `after`."""
    for d in exchange.changed_dims(before, after, problem.mesh_shape):
        old, new = cuts_of(before, problem.mesh_shape, d), cuts_of(after, problem.mesh_shape, d)
        if not new and problem.fixed(d):
            continue
        if old[: len(new)] != new:
            return False
        plain = all(pieces == 1 for _, _, pieces in old)
        legal = plain and (problem.fixed(d) or len(mesh_dims) == 1 or problem.even(d, cutting(before, d)))
        if not legal and (len(mesh_dims) > 1 or any(pieces > 1 for _, _, pieces in old[: len(new)])):
            return False
    return True
