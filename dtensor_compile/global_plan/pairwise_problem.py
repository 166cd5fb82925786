"""A choice for each of many variables, with a cost for each choice and for each pair of choices of some variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Cost of what is impossible; finite, so that differences stay numbers.
IMPOSSIBLE = 1e9


@dataclass(frozen=True)
class PairwiseProblem:
    """Minimize the sum of ``own[i][x_i]`` and ``pairs[i, j][x_i, x_j]`` over choices x.

    Attributes:
        own: per variable its costs, one for each choice.
        pairs: for pairs of variables ``i < j`` a matrix of costs; `IMPOSSIBLE` for pairs that cannot be.
    """

    own: Sequence[np.ndarray]
    pairs: Mapping[tuple[int, int], np.ndarray]

    def cost(self, choice: Sequence[int]) -> float:
        """The cost of one choice for each variable."""
        own = sum(float(costs[x]) for costs, x in zip(self.own, choice))
        return own + sum(float(costs[choice[i], choice[j]]) for (i, j), costs in self.pairs.items())


@dataclass(frozen=True)
class Solution:
    """Choices, their cost, and a lower bound on the cost of all choices."""

    choice: tuple[int, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How much lower than `cost` the best could be, as a fraction of it."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost > 0 else 0.0
