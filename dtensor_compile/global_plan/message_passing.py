"""Sequential tree-reweighted message passing (Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy
Minimization", IEEE PAMI 2006) over a `PairwiseProblem`, with removal of choices that no better solution can have.

Each pass over the variables in order and back raises a lower bound: the sum of the least costs of chains that share the
variables' costs among them. Choices are made on the way forward, each the best for those made before and the messages
from those after. While passing a variable, the bound with one of its choices held is known: a choice for which it is
above the best cost found so far is removed. What remains is solved exactly (`elimination`) if it is small enough; if
not, the choices of a variable are divided among two problems, and the one with the lower bound is searched next (branch
and bound), as long as that is little work.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtensor_compile.global_plan.elimination import MOST_ENTRIES, eliminate
from dtensor_compile.global_plan.pairwise_problem import PairwiseProblem, Solution

#: Passes at most, and the passes after which a bound that rose by less than a fraction ends them.
MOST_PASSES, PATIENCE, PROGRESS = 400, 12, 1e-5

#: Passes without progress after which what remains is solved exactly if its tables are small, and their entries.
SOON, SMALL = 2, 1 << 20

#: Passes over a problem of a branch, and work of all branches of a problem (see `Effort`).
BRANCH_PASSES, MOST_WORK = 24, 1 << 28

#: As `ndarray.min`, of which half of the time is a wrapper in Python for arrays of some entries.
_least = np.minimum.reduce

#: Work of a message beside that of its entries: its calls of numpy take as long as so many entries.
_MESSAGE = 3000


@dataclass
class Effort:
    """Work that searches may do, in entries of tables of costs that passes read: the same on all ranks, as times are
    not.

    Attributes:
        left: of all searches; passes over a whole problem go on beyond it, branches do not.
        branches: of branches of the next problem.
    """

    left: int = MOST_WORK
    branches: int = MOST_WORK


@dataclass
class _State:
    """Costs of the choices that are left, and messages.

    Attributes:
        left: per variable the choices that are left, as numbers in the problem.
        later, earlier: per variable its neighbors after and before it.
        down, up: by pair (i, j), messages from i to j and from j to i.
        best, cost: the best choices found, as numbers in the problem, and their cost.
        bound: below which no choices that are left cost.
    """

    own: list[np.ndarray]
    pairs: dict[tuple[int, int], np.ndarray]
    left: list[np.ndarray]
    later: list[list[int]]
    earlier: list[list[int]]
    down: dict[tuple[int, int], np.ndarray]
    up: dict[tuple[int, int], np.ndarray]
    best: tuple[int, ...] = ()
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

    def improve(self, chosen: Sequence[int]) -> None:
        """Takes choices, as places among those that are left, if they are better than the best."""
        cost = PairwiseProblem(self.own, self.pairs).cost(chosen)
        if cost < self.cost:
            self.cost, self.best = cost, tuple(int(left[x]) for left, x in zip(self.left, chosen))

    def closed(self, tolerance: float) -> bool:
        """Whether no choices that are left are better than the best by more than a fraction."""
        return self.cost - self.bound <= tolerance * abs(self.cost)


def solve(
    problem: PairwiseProblem, tolerance: float = 0.0, most: int = MOST_PASSES, effort: Effort | None = None
) -> Solution:
    """A solution with its bound; exact where what remains is small enough to be solved exactly.

    Args:
        tolerance: gap at which the search ends.
        most: passes at most.
        effort: that is left for this and further searches.
    """
    effort = effort or Effort()
    if not problem.own:
        return Solution((), 0.0, 0.0)
    root = _start(problem)
    _pass(root, tolerance, most, effort)
    tolerance = max(tolerance, 1e-12)
    if not root.closed(tolerance) and not _finish(root):
        root = _branch(root, tolerance, effort)
    cost = problem.cost(root.best)
    return Solution(root.best, cost, min(root.bound, cost))


def _pass(this: _State, tolerance: float, most: int, effort: Effort) -> None:
    """Passes messages until the gap is closed, or the bound rises no more."""
    stalled = 0
    for _ in range(most):
        before = this.bound
        effort.left -= 2 * sum(costs.size + _MESSAGE for costs in this.pairs.values())
        _forward(this)
        _backward(this)
        stalled = stalled + 1 if this.bound - before <= PROGRESS * abs(this.cost) else 0
        if this.closed(tolerance) or stalled == SOON and _finish(this, SMALL) or stalled >= PATIENCE:
            break


def _finish(this: _State, most: int = MOST_ENTRIES) -> bool:
    """Solves what remains exactly, if no table has more than `most` entries."""
    exact = eliminate(PairwiseProblem(this.own, this.pairs), most)
    if exact is None:
        return False
    this.improve(exact)
    this.bound = this.cost
    return True


def _branch(root: _State, tolerance: float, effort: Effort) -> _State:
    """Branch and bound: the best solution found, with the least bound of all branches."""
    best, number, dropped = root, 0, math.inf
    least = effort.left - effort.branches
    heap = [(root.bound, number, root)]
    while heap and effort.left > least:
        _, _, node = heapq.heappop(heap)
        node.best, node.cost = best.best, best.cost
        if node.closed(tolerance):
            heap.append((node.bound, number + 1, node))
            break
        for child in _halves(node):
            child.best, child.cost = best.best, best.cost
            _pass(child, tolerance, BRANCH_PASSES, effort)
            is_open = not child.closed(tolerance) and not _finish(child)
            best = min(best, child, key=lambda state: state.cost)
            number += 1
            if is_open:
                heapq.heappush(heap, (child.bound, number, child))
            else:
                dropped = min(dropped, child.bound)
    bound = min([best.cost, dropped, *(bound for bound, _, _ in heap)])
    return replace(best, bound=bound)


def _halves(this: _State) -> Iterator[_State]:
    """Two problems with half of the choices each of the variable that has most neighbors: the better ones, and the
    rest."""
    several = [i for i, left in enumerate(this.left) if len(left) > 1]
    i = max(several, key=lambda i: (len(this.later[i]) + len(this.earlier[i]), len(this.left[i]), -i))
    order = np.argsort(this.reparametrized(i), kind="stable")
    for part in (order[: len(order) // 2], order[len(order) // 2 :]):
        keep = np.zeros(len(order), bool)
        keep[part] = True
        child = replace(
            this, own=[*this.own], pairs={**this.pairs}, left=[*this.left], down={**this.down}, up={**this.up}
        )
        _remove(child, i, keep)
        yield child


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
            keep = total - _least(total) <= max(0.0, this.cost - this.bound) + 1e-12 * abs(this.cost)
            if not keep.all():
                _remove(this, i, keep)
                total, rounding = total[keep], rounding[keep]
        chosen.append(int(np.argmin(rounding)))
        share = this.share(i)
        for j in this.later[i]:
            message = _least((share * total - this.up[i, j])[:, None] + this.pairs[i, j], axis=0)
            this.down[i, j] = message - _least(message)
    this.improve(chosen)


def _remove(this: _State, i: int, keep: np.ndarray) -> None:
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
            message = _least((share * total - this.down[j, i])[None, :] + this.pairs[j, i], axis=1)
            least = _least(message)
            bound += float(least)
            this.up[j, i] = message - least
        bound += (1.0 - share * len(this.earlier[i])) * float(_least(total))
    this.bound = max(this.bound, bound)
