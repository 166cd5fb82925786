"""Chooses placements for a step: the least time within a budget of memory, with a lower bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtensor_compile.global_plan.cost_model import CostModel
from dtensor_compile.global_plan.message_passing import solve
from dtensor_compile.global_plan.pairwise_problem import IMPOSSIBLE

#: Weights of the bound of communication: the least cost with any of them is a lower bound on the step. Small ones are
#: for steps in which compute takes longer. Where communication does, the weight at which both are equal is searched
#: for.
_COMPUTE_BOUND, _LARGEST, _SEARCHES = (0.001, 0.1), 0.999, 4

#: Fraction of the seconds within which a plan that sends less is better (what is hidden still shares memory and cores),
#: and fraction of the bytes within which one that holds less is.
_AS_FAST, _AS_FEW = 0.005, 0.02

#: Gap of one search at which it ends, gap at which no other weights are tried, and searches for a price of memory. What
#: plans of equal time differ in, at small prices, is within a hundredth of a percent.
_TOLERANCE, _CLOSE, _PRICES = 1e-4, 1e-3, 10


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


def choose_placements(model: CostModel, budget: float | None = None, overlaps: bool = True) -> Choice:
    """The choice with the least seconds of a step whose memory is within the budget.

    Of those that are as fast, the one that sends least, and of those that send as little, the one that holds least. If
    none is found within the budget, the one with the least memory; `Choice.fits` says so.

    Args:
        model: of the step.
        budget: bytes a rank may hold; None for no limit.
        overlaps: whether redistributions of parameters and gradients run beside compute.
    """
    search = _Search(model, budget, overlaps)
    if not overlaps:
        choices, bound = search.within((1.0, 1.0))
        best = best_of(choices)
        return replace(best, bound=min(bound, best.seconds))
    found: list[Choice] = []
    bound = 0.0
    low, high = 0.0, _LARGEST
    for turn in range(len(_COMPUTE_BOUND) + _SEARCHES):
        hiding = _COMPUTE_BOUND[turn] if turn < len(_COMPUTE_BOUND) else (low + high) / 2
        # For each w between 0 and 1, (1 - w) (compute + contention hidden) + w hidden + exposed is a lower bound.
        weights = 1.0 - hiding, (1.0 - hiding) * model.contention + hiding
        choices, least = search.within(weights)
        # What a plan may lose in seconds for holding nothing: memory has a small price where it has none.
        price = _AS_FAST * choices[-1].seconds / max(1.0, choices[-1].memory)
        found += [*choices, search.at_price(weights, price)[0]]
        bound = max(bound, least)
        fastest = min((choice.seconds for choice in found if choice.fits), default=best_of(found).seconds)
        low, high = (max(low, hiding), high) if choices[-1].hidden > choices[-1].busy else (low, min(high, hiding))
        if turn >= len(_COMPUTE_BOUND) - 1:
            close = fastest - bound <= _CLOSE * fastest
            if close or low == 0.0:
                break
    best = best_of(found)
    return replace(best, bound=min(bound, best.seconds))


def choose_restricted(model: CostModel, kept: Mapping[int, Sequence[int]], budget: float | None = None) -> Choice:
    """`choose_placements` where some variables have only some of their choices; numbered as in the whole model.

    Args:
        kept: by number of a variable, the numbers of the choices that it keeps.
    """
    found = choose_placements(model.restricted(kept), budget)
    return replace(found, choice=tuple(kept[i][x] if i in kept else x for i, x in enumerate(found.choice)))


def best_of(found: Sequence[Choice]) -> Choice:
    """The one that `choose_placements` prefers."""
    fitting = [choice for choice in found if choice.fits]
    if not fitting:
        return min(found, key=lambda choice: choice.memory)
    limit = min(choice.seconds for choice in fitting) * (1.0 + _AS_FAST)
    as_fast = [choice for choice in fitting if choice.seconds <= limit]
    least = min(choice.sent for choice in as_fast) * (1.0 + _AS_FEW)
    return min((choice for choice in as_fast if choice.sent <= least), key=lambda choice: choice.memory)


class _Search:
    """Searches for choices of one model by weighted sums of its parts: weights of compute and of hidden communication,
    and a price of memory."""

    def __init__(self, model: CostModel, budget: float | None, overlaps: bool) -> None:
        self.model, self.budget, self.overlaps = model, budget, overlaps
        self.order = model.order()

    def within(self, weights: tuple[float, float]) -> tuple[list[Choice], float]:
        """Choices for prices of memory between which the budget is met, and the best lower bound (Lagrangian)."""
        first, bound = self.at_price(weights, 0.0)
        found = [first]
        if self.budget is None or first.fits:
            return found, bound
        low, high = 0.0, None
        price = first.seconds / self.budget
        for _ in range(_PRICES):
            choice, least = self.at_price(weights, price)
            found.append(choice)
            bound = max(bound, least - price * self.budget)
            if choice.fits:
                high = price
            else:
                low = price
            price = price * 8.0 if high is None else float(np.sqrt(max(low, high * 1e-3) * high))
        return found, bound

    def at_price(self, weights: tuple[float, float], price: float) -> tuple[Choice, float]:
        """The best choices, and the lower bound on the sum."""
        model = self.model
        solution = solve(model.problem(*weights, price), _TOLERANCE)
        choice = [0] * len(self.order)
        for i, x in zip(self.order, solution.choice):
            choice[i] = x
        compute, exposed, hidden, memory = map(float, model.parts(choice))
        made = Choice(
            choice=tuple(choice),
            compute=compute,
            exposed=exposed,
            hidden=hidden,
            memory=memory,
            sent=model.sent(choice),
            bound=0.0,
            fits=self.budget is None or memory <= self.budget,
            overlaps=self.overlaps,
            contention=model.contention,
        )
        return made, solution.bound
