"""Chooses placements for a step: the least time within a budget of memory, with a lower bound.

The step is relaxed (Lagrange): for each weight w between 0 and 1 of the bound of communication, and each price per byte
of memory,

    (1 - w) (compute + contention hidden) + w hidden + exposed + price (memory - budget)

is at most the seconds of any choice within the budget, and its least value over all choices (`message_passing`) a lower
bound on them. As a function of w and price, that of one choice is a plane, and the bound lies below the planes of all
that were found; the next search is where the lowest of them is highest (cutting planes: Kelley, "The Cutting-Plane
Method for Solving Convex Programs", 1960). The bound says how good a plan can be; the plan is the best that was found
or that combines what was found (`combine_choices`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtensor_compile.global_plan.combine_choices import MOST_COLUMNS, columns, combine
from dtensor_compile.global_plan.cost_model import CostModel
from dtensor_compile.global_plan.message_passing import MOST_WORK, Effort, solve
from dtensor_compile.global_plan.pairwise_problem import IMPOSSIBLE

#: Weights of the bound of communication that are searched first: in most steps compute takes longer. The largest.
_COMPUTE_BOUND, _LARGEST = (0.001, 0.1), 0.999

#: Seconds of a step that all the bytes of a budget are worth, at which a search finds least memory, and those tried if
#: that does not fit.
_CEILING, _UNLIMITED = 64.0, 65536.0

#: Fraction of the seconds within which a plan that sends less is better (what is hidden still shares memory and cores),
#: and fraction of the bytes within which one that holds less is.
_AS_FAST, _AS_FEW = 0.005, 0.02

#: Gap of one search at which it ends, gap at which there are no more searches, and searches at most. What plans of
#: equal time differ in, at small prices, is within a hundredth of a percent.
_TOLERANCE, _CLOSE, _SEARCHES = 1e-4, 1e-3, 16

#: Work of all searches (`Effort`), some seconds; that for a plan to compare with; and the part of what is left that one
#: search may spend on branches.
_WORK, _COMPARED, _SHARE = 1 << 31, 1 << 29, 32


@dataclass(frozen=True)
class Choice:
    """A choice for each variable.

    Attributes:
        choice: per variable of the model.
        compute, exposed, hidden: seconds of a step: of compute, of communication in its way, and of communication
            beside it.
        memory: bytes of parameters, gradients, optimizer states, and of what the backward pass needs.
        sent: bytes that a rank sends in a step.
        bound: seconds that no choice within the budget goes below.
        fits: whether the memory is within the budget.
        overlaps: whether `hidden` runs beside compute.
        contention: seconds of compute lost for each second of `hidden`.
    """

    choice: tuple[int, ...]
    compute: float
    exposed: float
    hidden: float
    memory: float
    sent: float
    bound: float
    fits: bool
    overlaps: bool = True
    contention: float = 0.0

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step."""
        if not self.overlaps:
            return self.exposed + self.compute + self.hidden
        return self.exposed + max(self.busy, self.hidden)

    @property
    def busy(self) -> float:
        """Seconds of compute with what it loses to communication beside it."""
        return self.compute + self.contention * self.hidden

    @property
    def possible(self) -> bool:
        """Whether the operators can run so at all."""
        return math.isfinite(self.seconds) and math.isfinite(self.hidden) and self.seconds < IMPOSSIBLE

    @property
    def gap(self) -> float:
        """How much less than `seconds` the best could take, as a fraction of it."""
        return max(0.0, self.seconds - self.bound) / self.seconds if self.seconds else 0.0


def choose_placements(
    model: CostModel, budget: float | None = None, overlaps: bool = True, work: int = _WORK
) -> Choice:
    """The choice with the least seconds of a step whose memory is within the budget.

    Of those that are as fast, the one that sends least, and of those that send as little, the one that holds least. If
    none is found within the budget, the one with the least memory; `Choice.fits` says so.

    Args:
        model: of the step.
        budget: bytes a rank may hold; None for no limit.
        overlaps: whether redistributions of parameters and gradients run beside compute.
        work: after which the search ends (`Effort.left`).
    """
    search = _Search(model, budget, overlaps, work)
    search.start()
    if search.fits() and any(choice.possible for choice in search.found):
        search.tighten()
        search.combine()
    best = best_of(search.found)
    return replace(best, bound=min(search.bound, best.seconds))


def choose_restricted(model: CostModel, kept: Mapping[int, Sequence[int]], budget: float | None = None) -> Choice:
    """`choose_placements`, with less work, where some variables have only some of their choices; numbered as in the
    whole model.

    Args:
        kept: by number of a variable, the numbers of the choices that it keeps.
    """
    found = choose_placements(model.restricted(kept), budget, work=_COMPARED)
    return replace(found, choice=tuple(kept[i][x] if i in kept else x for i, x in enumerate(found.choice)))


def best_of(found: Sequence[Choice]) -> Choice:
    """The one that `choose_placements` prefers."""
    fitting = [choice for choice in found if choice.fits]
    if not fitting:
        return min(found, key=lambda choice: (choice.memory, choice.seconds))
    limit = min(choice.seconds for choice in fitting) * (1.0 + _AS_FAST)
    as_fast = [choice for choice in fitting if choice.seconds <= limit]
    least = min(choice.sent for choice in as_fast) * (1.0 + _AS_FEW)
    return min((choice for choice in as_fast if choice.sent <= least), key=lambda choice: choice.memory)


class _Search:
    """Searches for choices of one model, by weights of communication and prices of memory.

    Attributes:
        found: choices of all searches.
        bound: seconds that no choice within the budget goes below.
        ceiling: the highest price, in seconds per byte.
    """

    def __init__(self, model: CostModel, budget: float | None, overlaps: bool, work: int) -> None:
        self.model, self.budget, self.overlaps = model, budget, overlaps
        self.order = model.order()
        self.found: list[Choice] = []
        self.bound = 0.0
        self.ceiling = 0.0
        self.effort = Effort(work)

    def fits(self) -> bool:
        """Whether a choice within the budget was found."""
        return any(choice.fits for choice in self.found)

    def start(self) -> None:
        """Searches without a price, and if nothing fits, at the highest."""
        for hiding in _COMPUTE_BOUND if self.overlaps else (0.0,):
            self._at_no_price(hiding)
        if self.budget is None or all(choice.fits for choice in self.found) or not self.found[0].possible:
            return
        seconds = self.found[0].seconds / max(1.0, self.budget)
        self.ceiling = _CEILING * seconds
        if not self.fits():
            self._at(_COMPUTE_BOUND[-1], self.ceiling)
        if not self.fits():
            self.ceiling = _UNLIMITED * seconds
            self._at(_COMPUTE_BOUND[-1], self.ceiling)

    def tighten(self) -> None:
        """Raises the bound where it can be raised most, until a choice is close to it."""
        tried: set[tuple[str, str]] = set()
        for _ in range(_SEARCHES):
            hiding, price, highest = self._best_weights()
            place = f"{hiding:.3f}", f"{price:.2e}"
            if self._closed() or place in tried or self.effort.left <= 0:
                return
            if highest - self.bound <= _CLOSE * highest:
                return
            tried.add(place)
            if price:
                self._at(hiding, price)
            else:
                self._at_no_price(hiding)

    def combine(self) -> None:
        """Adds the best combination of the choices that are best at the weights of the bound."""
        if self._closed():
            return
        hiding, price, _ = self._best_weights()
        at = np.array([1.0, hiding, price])
        near = sorted((choice for choice in self.found if choice.possible), key=lambda choice: self._plane(choice) @ at)
        best = best_of(self.found)
        kept = [[x] for x in best.choice]
        for choice in near:
            more = [sorted({*choices, x}) for choices, x in zip(kept, choice.choice)]
            if columns(self.model, more) <= MOST_COLUMNS:
                kept = more
        units = best.seconds, best.sent, best.memory
        combined = combine(self.model, kept, self.budget, self.overlaps, units)
        if combined is not None:
            self.found.append(self._made(combined))

    def _closed(self) -> bool:
        fastest = min((choice.seconds for choice in self.found if choice.fits), default=math.inf)
        return fastest - self.bound <= _CLOSE * fastest

    def _at_no_price(self, hiding: float) -> None:
        """Searches without a price, and at one for which a plan that holds nothing may be slower by a small fraction:
        memory has a price where it has none."""
        choice = self._at(hiding, 0.0)
        if choice.possible:
            self._at(hiding, _AS_FAST * choice.seconds / max(1.0, choice.memory))

    def _at(self, hiding: float, price: float) -> Choice:
        """The best choice for a weight and a price."""
        compute, hidden = 1.0, 1.0
        if self.overlaps:
            compute, hidden = 1.0 - hiding, (1.0 - hiding) * self.model.contention + hiding
        self.effort.branches = min(MOST_WORK, self.effort.left // _SHARE)
        solution = solve(self.model.problem(compute, hidden, price), _TOLERANCE, effort=self.effort)
        choice = [0] * len(self.order)
        for i, x in zip(self.order, solution.choice):
            choice[i] = x
        if self.budget is not None or not price:
            self.bound = max(self.bound, solution.bound - price * (self.budget or 0.0))
        self.found.append(self._made(choice))
        return self.found[-1]

    def _made(self, choice: Sequence[int]) -> Choice:
        compute, exposed, hidden, memory = map(float, self.model.parts(choice))
        return Choice(
            choice=tuple(choice),
            compute=compute,
            exposed=exposed,
            hidden=hidden,
            memory=memory,
            sent=self.model.sent(choice),
            bound=0.0,
            fits=self.budget is None or memory <= self.budget,
            overlaps=self.overlaps,
            contention=self.model.contention,
        )

    def _plane(self, choice: Choice) -> np.ndarray:
        """Of the relaxed step of a choice: its constant, and its slopes by weight and by price."""
        slope = choice.hidden - choice.busy if self.overlaps else 0.0
        return np.array([choice.seconds - max(0.0, slope), slope, choice.memory - (self.budget or 0.0)])

    def _best_weights(self) -> tuple[float, float, float]:
        """Weight and price at which the lowest plane is highest, and how high."""
        from scipy.optimize import linprog  # takes a third of a second: only where placements are searched

        planes = np.stack([self._plane(choice) for choice in self.found if choice.possible])
        # In units of a step and of the highest price, for the absolute tolerances of the solver.
        unit = max(float(np.abs(planes[:, 0]).max()), 1e-30)
        planes = planes * (1.0, 1.0, self.ceiling) / unit
        most = _LARGEST if self.overlaps else 0.0, 1.0 if self.ceiling else 0.0
        result = linprog(
            [0.0, 0.0, -1.0],
            A_ub=np.column_stack([-planes[:, 1:], np.ones(len(planes))]),
            b_ub=planes[:, 0],
            bounds=[(0.0, most[0]), (0.0, most[1]), (None, None)],
        )
        return float(result.x[0]), float(result.x[1]) * self.ceiling, float(result.x[2]) * unit
