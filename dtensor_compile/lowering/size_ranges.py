"""For which sizes a plan stays the cheapest, where sizes vary; and what a plan costs as an expression of them.

In: a plan that was made for the hints of symbolic sizes, and those sizes. Out: the values of one symbol, the others at
their hints, for which no legal plan is cheaper; or the bytes and seconds of the plan in the symbols. The plan itself is
right for all sizes.

Which steps are legal depends on what sizes are multiples of (`Problem.divisors`), not on the sizes. Where shards are
even every local tensor has a s + b elements of the symbol s, and what a step costs is affine in s:

    elements = k_e (a s + b)        seconds = rounds latency + (f / W + c / copy) itemsize k_e (a s + b)

So candidates are known for all s from their costs at two values, and one plan stops being the cheapest where its line
meets another one. All plans are found that no other beats at both ends of the range (count of collectives, elements and
seconds: Martins' multi-label algorithm, E. Martins: On a multicriteria shortest path problem, 1984).

Without a topology the fewest bytes win. All elements are proportional to the size, so that the plan stays the cheapest
for all. With one, seconds decide: latency for small sizes, bandwidth for large ones, and the range is finite where
another plan takes over.

    RS(0) -> S(1)S(1) of (16 s0, 64) on dp=2,tp=8, 1 Gbyte/s and 400:
        slice, all_gather, slice        cheapest for 2 <= s0 <= 549
        slice, all_to_all               cheapest for s0 >= 550
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
import torch

from dtensor_compile.compat.aot.shapes import Symbol, divisors, expressions, size_hints, symbols_of
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import value_of
from dtensor_compile.graph.nodes import read, redistributions, source_line
from dtensor_compile.ir.mesh import MeshLayout, parse_mesh
from dtensor_compile.ops.redistribute import plan_of
from dtensor_compile.planner.problem import Problem, State, Step
from dtensor_compile.planner.search import problem_between
from dtensor_compile.planner.steps import moves
from dtensor_compile.planner.torch_greedy import torch_steps
from dtensor_compile.topology.network import NO_TOPOLOGY, Network, current_memory, network_of

#: Value of a symbol from which on plans are no longer compared: a range that reaches it has no end.
ENDLESS = 1 << 40

#: Candidates up to which they are compared; there are more only where more mesh dims change than programs have.
MOST_CANDIDATES = 2000

#: Seconds are estimates: a plan is cheaper by them where it is by more than this part.
MARGIN = 1e-9


def tell_ranges(graph: torch.fx.Graph) -> list[Decision]:
    """A decision for every redistribution of symbolic sizes in `graph` that sends: for which sizes its plan is the
    cheapest.
    """
    decisions = []
    for node in redistributions(graph):
        this = read(node)
        layout, shape, itemsize = parse_mesh(this.mesh), this.sizes, value_of(node).element_size()
        reason = cheapest_for(this.source, this.target, layout, shape, itemsize)
        if reason:
            names = [layout.dim_name(dim) for dim in range(len(layout.dims))]
            steps = plan_of(this.source, this.target, layout, shape, itemsize)
            decisions.append(
                Decision("plan", source_line(node), reason, str(this), ", ".join(step.text(names) for step in steps))
            )
    return decisions


class SymbolicCost(NamedTuple):
    """Bytes that one rank sends and estimated seconds, in the symbols of the sizes."""

    bytes: sympy.Expr
    seconds: sympy.Expr


@dataclass(frozen=True)
class Range:
    """The values of a symbol from `low` to `high`, every `step`-th; `high` is None where they have no end."""

    low: int
    high: int | None
    step: int

    def text(self, name: str) -> str:
        """As ``64 <= s0 <= 4096``."""
        every = "" if self.step == 1 else f" in steps of {self.step}"
        return f"{name} >= {self.low}{every}" if self.high is None else f"{self.low} <= {name} <= {self.high}{every}"

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= (value if self.high is None else self.high) and (value - self.low) % self.step == 0


def symbolic(
    steps: Sequence[Step],
    mesh_shape: Sequence[int],
    shape: Sequence[Any],
    itemsize: int = 4,
    *,
    network: Network = NO_TOPOLOGY,
) -> SymbolicCost:
    """What a plan costs for a global tensor of `shape`: integers, torch's symbolic ones, or expressions of positive
    integer symbols.

    Equal to what `plan` says of its steps for every size, uneven ones too. Raises nothing.
    """
    sizes = tuple(size if isinstance(size, (int, sympy.Basic)) else expressions([size])[0] for size in shape)
    elements, seconds = sympy.Integer(0), sympy.Float(0)
    for step in steps:
        problem = Problem(step.before, step.after, tuple(mesh_shape), sizes, sizes, itemsize, network)
        priced = problem.step(step.kind, step.mesh_dims, step.before, step.after)
        elements, seconds = elements + priced.elements, seconds + priced.seconds
    return SymbolicCost(
        sympy.simplify(elements * itemsize).replace(_is_rounded_up, lambda floor: -sympy.ceiling(-floor.args[0])),
        seconds,
    )


def _is_rounded_up(expression: sympy.Expr) -> bool:
    """Whether an expression is ``floor(-x)``, which is how a rounded-up quotient is computed."""
    return isinstance(expression, sympy.floor) and expression.args[0].could_extract_minus_sign()


def cheapest_for(source: str, target: str, layout: MeshLayout, shape: Sequence[Any], itemsize: int) -> str:
    """For which values of each symbol of `shape` the plan for the hints is the cheapest, the other symbols at theirs.

    Empty where no size is symbolic, where nothing is sent, where memory is bounded, and where it is not known.
    """
    symbols = symbols_of(shape)
    if not symbols:
        return ""
    if current_memory() is not None:  # which plan fits depends on the sizes too
        return ""
    steps = plan_of(source, target, layout, shape, itemsize)
    if not any(step.sends for step in steps):
        return ""
    hints, network = size_hints(shape), network_of(layout)
    problem = problem_between(source, target, layout.shape, hints, divisors(shape), itemsize, network)
    return _told(problem, expressions(shape), steps, symbols)


@functools.lru_cache(maxsize=4096)
def _told(
    at_hints: Problem, sizes: tuple[sympy.Expr, ...], steps: tuple[Step, ...], symbols: tuple[Symbol, ...]
) -> str:
    texts = []
    for symbol in symbols:
        others = [other for other in symbols if other is not symbol]
        line = _line(sizes, symbol, {other.symbol: other.hint for other in others})
        found = line and cheapest_range(at_hints, line, symbol, steps)
        if found:
            at = ", ".join(f"{other.symbol} = {other.hint}" for other in others)
            texts.append(found.text(str(symbol.symbol)) + (f" at {at}" if at else ""))
    measure = "fewest bytes" if at_hints.network.uniform else "cheapest"
    return f"{measure} for " + "; for ".join(texts) if texts else ""


#: Sizes of a tensor in one symbol s, per dim (a, b) for ``a s + b``.
Line = tuple[tuple[int, int], ...]


def _line(sizes: Sequence[sympy.Expr], symbol: Symbol, others: dict[sympy.Symbol, int]) -> Line | None:
    """The sizes as functions of one symbol, the others at their hints; None where one is not affine, or more than one
    varies.
    """
    line = []
    for size in sizes:
        size = sympy.sympify(size).xreplace({other: sympy.Integer(hint) for other, hint in others.items()})
        if not size.is_polynomial(symbol.symbol):
            return None
        slope, rest = size.coeff(symbol.symbol, 1), size.subs(symbol.symbol, 0)
        if not (slope.is_Integer and rest.is_Integer) or sympy.expand(size - slope * symbol.symbol - rest) != 0:
            return None
        line.append((int(slope), int(rest)))
    return tuple(line) if sum(slope != 0 for slope, _ in line) == 1 and all(slope >= 0 for slope, _ in line) else None


def cheapest_range(at_hint: Problem, line: Line, symbol: Symbol, steps: Sequence[Step]) -> Range | None:
    """The values of `symbol` around its hint for which no legal plan is cheaper than `steps`.

    Args:
        at_hint: what the plan is for, where the symbol has its hint.
        line: the global shape, per dim (a, b) for a size of ``a s + b``; exactly one varies.
        steps: the plan.

    Only values for which shards are even count. None where there are none, where `steps` is not the cheapest at the
    nearest to the hint that counts, and where there are more candidates than are worth the time.
    """
    values = _even_values(at_hint, line, symbol, math.prod(at_hint.mesh_shape))
    if values is None or not at_hint.free:
        return None
    first, last, every = values
    ends = _with_value(at_hint, line, first), _with_value(at_hint, line, last)
    theirs = torch_steps(ends[0])
    limit = None if theirs is None else _price(ends, theirs)
    candidates = _candidates(ends, limit)
    if candidates is None:
        return None
    rivals = _Rivals(_price(ends, steps), candidates, limit, first, last, at_hint.network.uniform)
    near = first + round((min(max(symbol.hint, first), last) - first) / every) * every
    if not rivals.none_at(near):
        return None
    looks = rivals.worth_a_look(every)
    low = _reached(rivals, near, [value for value in reversed(looks) if value < near])
    high = _reached(rivals, near, [value for value in looks if value > near])
    return Range(low, None if high == last and symbol.high is None else high, every)


def _with_value(problem: Problem, line: Line, value: int) -> Problem:
    """The same problem where the symbol of `line` has another value."""
    return replace(problem, shape=tuple(a * value + b for a, b in line))


def _reached(rivals: _Rivals, near: int, values: Sequence[int]) -> int:
    """The last of `values`, which lead away from `near`, up to which no candidate is cheaper."""
    reached = near
    for value in values:
        if not rivals.none_at(value):
            break
        reached = value
    return reached


def _even_values(at_hint: Problem, line: Line, symbol: Symbol, ranks: int) -> tuple[int, int, int] | None:
    """First, last and distance of the values of the symbol for which shards are even, and their parts as well."""
    (dim,) = (d for d, (a, _) in enumerate(line) if a)
    slope, rest = line[dim]
    others = math.prod(size for d, size in enumerate(at_hint.shape) if d != dim)
    if not others:
        return None
    needed = 1 if dim not in at_hint.dims and others % ranks == 0 else ranks
    every = needed // math.gcd(slope, needed)
    last = ENDLESS if symbol.high is None else symbol.high
    # A size that equals what it is known to be a multiple of reads as one that is fixed.
    for first in range(symbol.low, min(symbol.low + 2 * every + 2, last)):
        size = slope * first + rest
        if size > 0 and size % needed == 0 and size != at_hint.divisors[dim]:
            last -= (last - first) % every
            return (first, last, every) if last > first else None
    return None


class _Price(NamedTuple):
    """What a plan costs at both ends: collectives, elements and seconds."""

    collectives: int
    elements: tuple[int, int]
    seconds: tuple[float, float]

    def plus(self, steps: tuple[Step, Step]) -> _Price:
        elements = self.elements[0] + steps[0].elements, self.elements[1] + steps[1].elements
        return _Price(
            self.collectives + steps[0].sends,
            elements,
            (self.seconds[0] + steps[0].seconds, self.seconds[1] + steps[1].seconds),
        )

    def is_never_more(self, other: _Price) -> bool:
        return (
            self.collectives <= other.collectives
            and all(a <= b for a, b in zip(self.elements, other.elements))
            and all(a <= b for a, b in zip(self.seconds, other.seconds))
        )

    def may_be_within(self, limit: _Price | None) -> bool:
        """Whether it has no more collectives than `limit`, nor more elements at every value."""
        if limit is None:
            return True
        return self.collectives <= limit.collectives and any(a <= b for a, b in zip(self.elements, limit.elements))


_NOTHING = _Price(0, (0, 0), (0.0, 0.0))


def _price(ends: tuple[Problem, Problem], steps: Sequence[Step]) -> _Price:
    price = _NOTHING
    for step in steps:
        first, last = (problem.step(step.kind, step.mesh_dims, step.before, step.after) for problem in ends)
        price = price.plus((first, last))
    return price


def _candidates(ends: tuple[Problem, Problem], limit: _Price | None) -> list[_Price] | None:
    """Prices of all plans of which no other one costs at most as much at both ends; None where there are too many."""
    kept: dict[State, list[_Price]] = {ends[0].start: [_NOTHING]}
    pending = [(ends[0].start, _NOTHING)]
    seen = 0
    while pending:
        state, price = pending.pop(0)
        seen += 1
        if seen > MOST_CANDIDATES:
            return None
        if state == ends[0].goal or price not in kept[state]:
            continue
        for pair in zip(moves(ends[0], state), moves(ends[1], state), strict=True):
            if pair[0].sends and len(pair[0].mesh_dims) > 1 and not ends[0].network.merges:
                continue
            after, more = pair[0].after, price.plus(pair)
            others = kept.setdefault(after, [])
            if not more.may_be_within(limit) or any(other.is_never_more(more) for other in others):
                continue
            others[:] = [other for other in others if not more.is_never_more(other)]
            others.append(more)
            pending.append((after, more))
    return kept.get(ends[0].goal, [])


@dataclass(frozen=True)
class _Rivals:
    """Plans that may be cheaper than one, at values between two."""

    mine: _Price
    candidates: list[_Price]
    limit: _Price | None
    first: int
    last: int
    bytes_first: bool

    def none_at(self, value: int) -> bool:
        """Whether no candidate is cheaper, and the plan within the limit."""
        at = Fraction(value - self.first, self.last - self.first)
        elements, seconds = self._at(self.mine, at)
        most = None if self.limit is None else self._at(self.limit, at)[0]
        if most is not None and elements > most:
            return False
        for other in self.candidates:
            sent, took = self._at(other, at)
            if most is not None and sent > most:
                continue
            if sent < elements if self.bytes_first else took < seconds * (1 - MARGIN):
                return False
        return True

    @staticmethod
    def _at(price: _Price, at: Fraction) -> tuple[Fraction, float]:
        elements = price.elements[0] + at * (price.elements[1] - price.elements[0])
        return elements, price.seconds[0] + float(at) * (price.seconds[1] - price.seconds[0])

    def worth_a_look(self, every: int) -> list[int]:
        """The values, ascending, between which nothing changes: the ends, and those around the crossings of two
        lines.
        """
        found = {self.first, self.last}
        for at in self._crossings():
            place = self.first + (at * (self.last - self.first) // every * every if 0 <= at <= 1 else 0)
            found.update(
                value for value in range(place - every, place + 3 * every, every) if self.first <= value <= self.last
            )
        return sorted(found)

    def _crossings(self) -> Iterator[Fraction]:
        for other in (*self.candidates, *([] if self.limit is None else [self.limit])):
            pairs = [(self.mine.elements, other.elements), (self.mine.seconds, other.seconds)]
            pairs += [] if self.limit is None else [(other.elements, self.limit.elements)]
            for (a, b), (c, d) in pairs:
                difference = Fraction(a) - Fraction(c), Fraction(b) - Fraction(d)
                if difference[0] != difference[1]:
                    yield difference[0] / (difference[0] - difference[1])
