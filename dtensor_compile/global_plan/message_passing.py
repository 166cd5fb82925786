"""Sequential tree-reweighted message passing (Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy
Minimization", IEEE PAMI 2006) over a `PairwiseProblem`, with removal of choices that no better solution can have.

Each pass over the variables in order and back raises a lower bound: the sum of the least costs of chains that share the
variables' costs among them. Choices are made on the way forward, each the best for those made before and the messages
from those after. While passing a variable, the bound with one of its choices held is known: a choice for which it is
above the best cost found so far is removed. What remains is solved exactly (`elimination`) if it is small enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from dtensor_compile.global_plan.elimination import eliminate
from dtensor_compile.global_plan.pairwise_problem import PairwiseProblem, Solution

#: Passes at most, and the passes after which a bound that rose by less than a fraction ends them.
MOST_PASSES, PATIENCE, PROGRESS = 400, 12, 1e-5


@dataclass
class _State:
    """Costs of the choices that are left, and messages.

    Attributes:
        left: per variable the choices that are left, as numbers in the problem.
        later, earlier: per variable its neighbors after and before it.
        down, up: by pair (i, j), messages from i to j and from j to i.
        best: places in `left` of the best choices found.
    """

    own: list[np.ndarray]
    pairs: dict[tuple[int, int], np.ndarray]
    left: list[np.ndarray]
    later: list[list[int]]
    earlier: list[list[int]]
    down: dict[tuple[int, int], np.ndarray]
    up: dict[tuple[int, int], np.ndarray]
    best: list[int] = field(default_factory=list)
    cost: float = math.inf
    bound: float = -math.inf

    def share(self, i: int) -> float:
        """The part of a variable's cost that each of the chains through it has."""
        return 1.0 / max(len(self.later[i]), len(self.earlier[i]), 1)

    def reparametrized(self, i: int) -> np.ndarray:
        """Costs of a variable and all messages to it."""
        total = self.own[i].copy()
        for j in self.earlier[i]:
            total += self.down[j, i]
        for j in self.later[i]:
            total += self.up[i, j]
        return total


def solve(problem: PairwiseProblem, tolerance: float = 0.0, most: int = MOST_PASSES) -> Solution:
    """A solution with its bound; exact where what remains is small enough to be solved exactly.

    Args:
        tolerance: gap at which the search ends.
        most: passes at most.
    """
    if not problem.own:
        return Solution((), 0.0, 0.0)
    state = _start(problem)
    stalled = 0
    for _ in range(most):
        before = state.bound
        _forward(state)
        _backward(state)
        stalled = stalled + 1 if state.bound - before <= PROGRESS * abs(state.cost) else 0
        if state.cost - state.bound <= tolerance * abs(state.cost) or stalled >= PATIENCE:
            break
    choice = tuple(int(left[x]) for left, x in zip(state.left, state.best))
    found = Solution(choice, problem.cost(choice), min(state.bound, state.cost))
    if found.cost - found.bound <= max(tolerance, 1e-12) * abs(found.cost):
        return found
    exact = eliminate(PairwiseProblem(state.own, state.pairs))
    if exact is None:
        return found
    choice = tuple(int(left[x]) for left, x in zip(state.left, exact))
    cost = problem.cost(choice)
    return Solution(choice, cost, cost) if cost <= found.cost else Solution(found.choice, found.cost, found.cost)


def _start(problem: PairwiseProblem) -> _State:
    n = len(problem.own)
    later: list[list[int]] = [[] for _ in range(n)]
    earlier: list[list[int]] = [[] for _ in range(n)]
    for i, j in problem.pairs:
        later[i].append(j)
        earlier[j].append(i)
    return _State(
        own=[np.asarray(costs, float) for costs in problem.own],
        pairs={pair: np.asarray(costs, float) for pair, costs in problem.pairs.items()},
        left=[np.arange(len(costs)) for costs in problem.own],
        later=later,
        earlier=earlier,
        down={pair: np.zeros(costs.shape[1]) for pair, costs in problem.pairs.items()},
        up={pair: np.zeros(costs.shape[0]) for pair, costs in problem.pairs.items()},
    )


def _forward(this: _State) -> None:
    """Passes messages to later variables, makes choices, and removes choices that cannot be better."""
    chosen: list[int] = []
    for i in range(len(this.own)):
        total = this.reparametrized(i)
        rounding = this.own[i].copy()
        for j in this.earlier[i]:
            rounding += this.pairs[j, i][chosen[j]]
        for j in this.later[i]:
            rounding += this.up[i, j]
        if math.isfinite(this.bound):
            keep = total - total.min() <= this.cost - this.bound + 1e-12 * abs(this.cost)
            keep[this.best[i]] = True
            if not keep.all():
                _remove(this, i, keep)
                total, rounding = total[keep], rounding[keep]
        chosen.append(int(np.argmin(rounding)))
        share = this.share(i)
        for j in this.later[i]:
            message = ((share * total - this.up[i, j])[:, None] + this.pairs[i, j]).min(axis=0)
            this.down[i, j] = message - message.min()
    cost = PairwiseProblem(this.own, this.pairs).cost(chosen)
    if cost < this.cost:
        this.cost, this.best = cost, chosen


def _remove(this: _State, i: int, keep: np.ndarray) -> None:
    this.best[i] = int(np.count_nonzero(keep[: this.best[i]]))
    this.own[i], this.left[i] = this.own[i][keep], this.left[i][keep]
    for j in this.later[i]:
        this.pairs[i, j], this.up[i, j] = this.pairs[i, j][keep], this.up[i, j][keep]
    for j in this.earlier[i]:
        this.pairs[j, i], this.down[j, i] = this.pairs[j, i][:, keep], this.down[j, i][keep]


def _backward(this: _State) -> None:
    """Passes messages to earlier variables, and adds up the bound."""
    bound = 0.0
    for i in reversed(range(len(this.own))):
        total = this.reparametrized(i)
        share = this.share(i)
        for j in this.earlier[i]:
            message = ((share * total - this.down[j, i])[None, :] + this.pairs[j, i]).min(axis=1)
            bound += float(message.min())
            this.up[j, i] = message - message.min()
        bound += (1.0 - share * len(this.earlier[i])) * float(total.min())
    this.bound = max(this.bound, bound)
