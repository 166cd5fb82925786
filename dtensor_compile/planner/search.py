"""Finds the collectives that lead from one spec to another.

In: two specs on one mesh, the global shape, the links along the mesh dims. Out: a tuple of `Step` (`planner/steps.py`
lists the kinds): the cheapest path over the specs that a tensor can have, found with Dijkstra's algorithm.

    S(0)S(0) -> RR on dp=2,tp=4     all_gather[dp,tp] S(0)S(0)->RR         one collective over both mesh dims
    P(sum)S(0) -> S(0)S(1)          exchange[0,1] P(sum)S(0)->S(0)S(1)     reduced and redistributed in one all-to-all
    S(0)R -> RS(0)                  exchange[0,1] S(0)R->RS(0)             every rank receives the shard that it lacks

The cheapest plan: if all mesh dims have equal links (no topology was named), the fewest bytes, then the fewest seconds;
if a topology distinguishes them, the fewest seconds, then the fewest bytes (`planner/step_costs.py`).

The search tries steps towards placements of start and goal. If two mesh dims shard unevenly, a path over other
placements can send less, because the busiest rank counts; it is taken if it saves more than 1%.

With a memory bound, plans that hold more at once (besides their input) are left out.

A plan is never worse than torch's own: the cheapest in time could have one more collective for fewer bytes, or more
bytes for one collective less. torch's greedy path is one of the paths here, so paths with more collectives or more
bytes than that one are left out, and at least that one remains. Paths of torch's other planner are among them too, so
the plan with the fewest bytes has no more than those. If torch's path holds too much memory, it is no limit.

Plans depend on specs, sizes, the mesh and the topology alone, never on the rank, so that all ranks choose the same one.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from dtensor_compile.compat.dtensor.specs import Partial, Placement, Replicate, Shard
from dtensor_compile.errors import MemoryBudgetError, PlanError
from dtensor_compile.ir.spec import parse_spec, placement_text, spec_text
from dtensor_compile.planner.memory import HeldMemory, peak_elements
from dtensor_compile.planner.problem import Problem, State, Step
from dtensor_compile.planner.shard_intervals import CUTS
from dtensor_compile.planner.step_costs import COLLECTIVES, StepKind, elements_sent
from dtensor_compile.planner.steps import legal_steps
from dtensor_compile.planner.torch_greedy import torch_steps
from dtensor_compile.topology.network import NO_TOPOLOGY, Network

#: Reduce ops for which a value v can be partitioned exactly into terms: v/n for a sum, v for the others.
_PARTITIONS = ("sum", "avg", "min", "max")


#: Fraction of the elements that a path over placements of neither start nor goal must save.
WORTH_A_DETOUR = 0.01

#: Maximum number of targets among which an error message searches for one within the memory bound.
MOST_TARGETS = 512


def _commute(placements: Sequence[Placement]) -> bool:
    """Whether the pending reductions of `placements` may be done in any order: one kind, or sums and averages."""
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(ops) <= 1 or ops <= {"sum", "avg"}


def cheapest_plan(
    source: str,
    target: str,
    mesh_shape: Sequence[int],
    shape: Sequence[int],
    itemsize: int = 4,
    *,
    network: Network = NO_TOPOLOGY,
    divisors: Sequence[int] | None = None,
    memory: int | None = None,
) -> tuple[Step, ...]:
    """The cheapest steps from spec `source` to spec `target` for a global tensor of `shape` (elements per dim).

    An empty tuple means that the local tensor already is that of the target spec.

    Args:
        itemsize: bytes of an element.
        network: links along the mesh dims.
        divisors: known divisors of sizes that are hints of symbolic ones. The plan is correct for all multiples, and
            the cheapest for the hints.
        memory: bytes that one rank may hold at once besides its input: result, buffers, intermediates.

    Raises:
        MemoryBudgetError: every plan holds more than `memory`.
        PlanError: a placement names a dim that the tensor does not have, the specs do not fit the mesh, or no path
            exists (from one kind of partial to another, which torch refuses too).
    """
    known = tuple(shape if divisors is None else divisors)
    return _plan(source, target, tuple(mesh_shape), tuple(shape), itemsize, network, known, memory)


@functools.lru_cache(maxsize=65536)
def _plan(
    source: str,
    target: str,
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    itemsize: int,
    network: Network,
    divisors: tuple[int, ...],
    memory: int | None,
) -> tuple[Step, ...]:
    problem = problem_between(source, target, mesh_shape, shape, divisors, itemsize, network)
    if problem.start == problem.goal:
        return ()
    for a, b in zip(problem.start, problem.goal):
        if isinstance(b, Partial) and a != b:
            _check_partial(source, target, a, b)
    return cheapest(problem if memory is None else replace(problem, memory=memory // itemsize))


def problem_between(
    source: str,
    target: str,
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    divisors: tuple[int, ...],
    itemsize: int = 4,
    network: Network = NO_TOPOLOGY,
) -> Problem:
    """The problem of `plan`, without a memory bound; arguments and errors are as there."""
    start, goal = checked(source, mesh_shape, shape), checked(target, mesh_shape, shape)
    return Problem(start, goal, mesh_shape, shape, divisors, itemsize, network)


def checked(text: str, mesh_shape: Sequence[int], shape: Sequence[int]) -> State:
    """The placements of a spec that a tensor of `shape` can have; on a mesh dim of size 1 all are equivalent."""
    placements = parse_spec(text)
    if len(placements) != len(mesh_shape):
        raise PlanError(f"spec {text} has {len(placements)} placements, but the mesh has {len(mesh_shape)} dims")
    for p in placements:
        if isinstance(p, CUTS) and p.dim >= len(shape):
            near = f"the nearest that it can have: {spec_text([_nearest(q, len(shape)) for q in placements])}"
            raise PlanError(
                f"{placement_text(p)} in spec {text}: the tensor has {len(shape)} dims, {tuple(shape)}; {near}"
            )
    state = tuple(Replicate() if n == 1 else p for p, n in zip(placements, mesh_shape))
    if not _commute(state):
        raise PlanError(
            f"spec {text} mixes reductions whose order matters: reduce the one before the other becomes partial, "
            f"as in {spec_text(_one_reduction(state))}"
        )
    return state


def _nearest(placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, CUTS) and placement.dim >= ndim:
        return Replicate() if ndim == 0 else type(placement)(ndim - 1, **_factor(placement))
    return placement


def _factor(placement: Placement) -> dict[str, int]:
    return {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}


def _one_reduction(state: State) -> list[Placement]:
    first = next(p for p in state if isinstance(p, Partial))
    return [Replicate() if isinstance(p, Partial) and p != first else p for p in state]


def _check_partial(source: str, target: str, a: Placement, b: Partial) -> None:
    """Raises `PlanError` if no path leads from placement `a` to the partial `b`."""
    if isinstance(a, Partial):
        again = f" and R->{placement_text(b)} as two" if b.reduce_op in _PARTITIONS else " is the nearest legal one"
        legal = f"{placement_text(a)}->R{again}"
    elif b.reduce_op not in _PARTITIONS:
        legal = f"{placement_text(a)}->R is the nearest legal one"
    else:
        return
    raise PlanError(
        f"redistribute from {source} to {target} not supported: "
        f"nothing leads from {placement_text(a)} to {placement_text(b)}; {legal}"
    )


def cheapest(problem: Problem) -> tuple[Step, ...]:
    """The cheapest path. Raises `PlanError` if there is none."""
    free = _free(replace(problem, memory=math.inf))
    if free is None:
        change = f"{spec_text(problem.start)} to {spec_text(problem.goal)}"
        raise PlanError(
            f"redistribute from {change}: no sequence of collectives found; go by {'R' * len(problem.goal)}"
        )
    if problem.memory == math.inf or _peak(problem, free).most <= problem.memory:
        return free
    steps = _search(problem)
    if steps is None:
        raise _over_budget(problem, free)
    return steps


def _free(problem: Problem) -> tuple[Step, ...] | None:
    """The cheapest path without a memory bound, including paths over other placements that save enough for their
    messages.
    """
    direct = _search(problem)
    sent = sum(step.elements for step in direct or ())
    if not sent or not problem.may_detour:
        return direct
    detour = replace(problem, detours=True, most=sent - WORTH_A_DETOUR * sent)
    if not detour.may_end(problem.start, 0, math.inf):
        return direct
    # If messages count, the path with the fewest seconds decides, even if it sends too much.
    other = _search(detour if problem.network.uniform else replace(detour, most=math.inf))
    return other if other and sum(step.elements for step in other) < detour.most else direct


def _search(problem: Problem) -> tuple[Step, ...] | None:
    """Dijkstra's algorithm within torch's limits, and within the memory of the problem; None if no path leads to the
    goal.

    A path to a state is kept unless another has no higher cost, no more collectives and no more elements. Ties are
    broken by order of discovery, which is the same on every rank.
    """
    limits = _Limits.of(problem)
    theirs, bounded = limits.steps, problem.memory < math.inf
    order = itertools.count()
    bytes_first = problem.network.uniform

    def key(elements: float, seconds: float) -> tuple[float, float]:
        return (elements, seconds) if bytes_first else (seconds, elements)

    queue: list[tuple[tuple[float, float], int, State, tuple[Step, ...], int, int, float]]
    queue = [((0.0, 0.0), next(order), problem.start, (), 0, 0, 0.0)]
    done: dict[State, list[tuple[int, int, int]]] = {}
    while queue:
        cost, _, state, steps, count, elements, seconds = heapq.heappop(queue)
        if state == problem.goal:
            if theirs is not None and not problem.free and key(limits.elements, sum(s.seconds for s in theirs)) <= cost:
                return theirs
            return steps
        kept, lies_in = done.setdefault(state, []), _peak(problem, steps[-1:]).kept if bounded else 0
        if any(c <= count and e <= elements and m <= lies_in for c, e, m in kept):
            continue
        kept.append((count, elements, lies_in))
        for step in legal_steps(problem, state, elements, limits.collectives - count):
            after = count + step.sends, elements + step.elements
            if not limits.allow(problem, step, *after):
                continue
            if bounded and _peak(problem, (*steps[-1:], step)).most > problem.memory:
                continue
            time = seconds + step.seconds
            heapq.heappush(queue, (key(after[1], time), next(order), step.after, (*steps, step), *after, time))
    return theirs


class _Limits(NamedTuple):
    """Limits of a path: those of torch's own path, if that keeps the memory bound.

    Attributes:
        steps: torch's own; None if there is none within the bound.
        collectives, elements: of those.
    """

    steps: tuple[Step, ...] | None
    collectives: float
    elements: float

    @classmethod
    def of(cls, problem: Problem) -> _Limits:
        theirs = torch_steps(problem)
        if theirs is None or problem.memory < math.inf and _peak(problem, theirs).most > problem.memory:
            return cls(None, math.inf, math.inf)
        return cls(theirs, collectives(theirs), sum(step.elements for step in theirs))

    def allow(self, problem: Problem, step: Step, count: int, elements: int) -> bool:
        """Whether a path may continue by `step`, after which it has `count` collectives and `elements` elements."""
        if step.sends and len(step.mesh_dims) > 1 and not problem.network.merges:
            return False
        if count > self.collectives or elements > self.elements:
            return False
        return not problem.detours or problem.may_end(step.after, elements, self.collectives - count)


def _peak(problem: Problem, steps: Sequence[Step]) -> HeldMemory:
    return peak_elements(steps, problem.mesh_shape, problem.shape)


def _over_budget(problem: Problem, steps: Sequence[Step]) -> MemoryBudgetError:
    """The error if no plan is within the memory of `problem`; `steps` is the cheapest."""
    change, size = f"from {spec_text(problem.start)} to {spec_text(problem.goal)}", problem.itemsize
    found = largest_target(
        problem.goal,
        problem.start,
        len(problem.shape),
        problem.local,
        lambda goal: _search(replace(problem, goal=goal)) is not None,
    )
    legal = (
        f"redistribute to {spec_text(found)}, the largest within the bound"
        if found
        else f"leave it {spec_text(problem.start)}"
    )
    memory, held, least = (size * n for n in (int(problem.memory), _peak(problem, steps).most, _least_memory(problem)))
    return over_budget(change, "; ".join(map(str, steps)), memory, held, least, legal)


def over_budget(change: str, text: str, memory: int, held: int, least: int, legal: str) -> MemoryBudgetError:
    """The error if every plan holds too much memory.

    Args:
        change, text: the redistribution, and its cheapest plan.
        memory, held, least: bytes of the bound, of the cheapest plan, and of the plan with the smallest peak.
        legal: a suggestion that is within the bound.
    """
    return MemoryBudgetError(
        f"redistribute {change}: the cheapest plan ({text}) holds {held:,} bytes at once besides its input, and "
        f"redistribution_memory allows {memory:,}: allow {least:,}, or {legal}"
    )


def largest_target(
    goal: State, start: State | None, ndim: int, local: Callable[[State], int], leads: Callable[[State], bool]
) -> State | None:
    """The spec with the largest local tensor to which a plan leads, among those that also shard where `goal` does not.

    Args:
        start: the source spec, whose placements may stay; None on another mesh.
        ndim: number of tensor dims.
        local: returns the elements of the local tensor.
        leads: returns whether there is a plan.
    """
    options = []
    for i, placement in enumerate(goal):
        cut = map(Shard, range(ndim)) if isinstance(placement, Replicate) else ()
        options.append(dict.fromkeys([placement, *([start[i]] if start else []), *cut]))
    targets = [t for t in itertools.islice(itertools.product(*options), MOST_TARGETS) if t not in (start, goal)]
    legal = [t for t in targets if not any(isinstance(p, Partial) for p in t)]
    return next((t for t in sorted(legal, key=local, reverse=True) if leads(t)), None)


def _least_memory(problem: Problem) -> int:
    """Peak number of elements of the plan with the smallest footprint."""
    order = itertools.count()
    queue: list[tuple[int, int, State, int]] = [
        (0, next(order), problem.start, 0)
    ]  # and the elements of the result's buffer
    done: set[tuple[State, int]] = set()
    while queue:
        most, _, state, kept = heapq.heappop(queue)
        if state == problem.goal:
            return most
        if (state, kept) in done:
            continue
        done.add((state, kept))
        for step in legal_steps(problem, state):
            if problem.network.merges or not step.sends or len(step.mesh_dims) == 1:
                held = _peak(problem, (step,))
                heapq.heappush(queue, (max(most, kept + held.most), next(order), step.after, held.kept))
    raise AssertionError("there is a plan without the bound")


def bytes_sent(steps: Sequence[Step], itemsize: int) -> int:
    """Bytes that one rank sends for the plan."""
    return sum(step.elements for step in steps) * itemsize


def collectives(steps: Sequence[Step]) -> int:
    """Number of collectives in the plan."""
    return sum(step.sends for step in steps)


__all__ = ["COLLECTIVES", "Step", "StepKind", "bytes_sent", "collectives", "cheapest_plan", "elements_sent"]
