"""The best combination of choices that searches found, as a mixed-integer program for HiGHS (`scipy.optimize.milp`).

With a price of memory and a weight of hidden communication, a search finds choices that are best for some sum of the
parts of a step. The step itself is no such sum: its memory is limited, and the longer of compute and hidden
communication counts. The best within a budget takes some choices from a fast plan and others from a small one. For few
choices of each variable this is solved as it is written (the local polytope: Wainwright and Jordan, "Graphical Models,
Exponential Families, and Variational Inference", 2008, section 4.1.1):

- for each variable one binary for each choice, of which one is 1;
- for each pair one number for each two choices, whose sums by rows and by columns are these binaries;
- a number that is at least the seconds of compute with contention, and at least those of hidden communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dtensor_compile.global_plan.cost_model import MEMORY, CostModel
from dtensor_compile.global_plan.pairwise_problem import IMPOSSIBLE

if TYPE_CHECKING:
    from scipy import sparse

#: Columns of a program at most, nodes of its branch and bound, and the gap at which that ends.
MOST_COLUMNS, _NODES, _GAP = 3072, 32, 1e-3

#: Fraction of the seconds that all bytes sent, and all bytes held, are worth: of plans as fast, the smaller one.
_BYTES_WORTH = 0.0025


def columns(model: CostModel, kept: Sequence[Sequence[int]]) -> int:
    """Columns that the program has if each variable keeps some choices, those of what is certain left out."""
    sizes = [len(choices) for choices in kept]
    several = sum(size for size in sizes if size > 1)
    return several + sum(sizes[i] * sizes[j] for i, j in model.pairs if sizes[i] > 1 and sizes[j] > 1)


def combine(
    model: CostModel,
    kept: Sequence[Sequence[int]],
    budget: float | None,
    overlaps: bool,
    units: tuple[float, float, float],
) -> tuple[int, ...] | None:
    """The choices with the least seconds whose memory is within the budget; None if there are none.

    Of plans as fast, one that sends and holds less: all bytes are worth a small fraction of the seconds.

    Args:
        model: of the step.
        kept: per variable the numbers of the choices to combine.
        budget: bytes; None for no limit.
        overlaps: whether hidden communication runs beside compute.
        units: seconds, bytes sent and bytes held of a plan like the one that is looked for (tolerances of solvers are
            absolute: all numbers are near 1).
    """
    few = model.restricted(dict(enumerate(kept)))
    own, between = [], {}
    for compute, memory in zip(few.compute, few.memory):
        zero = np.zeros_like(compute)
        own.append(np.stack([compute, zero, zero, memory, zero]))
    for (i, j), pair in few.pairs.items():
        parts = np.stack([np.zeros_like(pair.exposed), pair.exposed, pair.hidden, pair.memory, pair.sent])
        if i == j:
            own[i] = own[i] + np.diagonal(parts, axis1=1, axis2=2)
        else:
            between[i, j] = parts
    program = _Program()
    variables = [program.variable(parts) for parts in own]
    for (i, j), parts in between.items():
        program.pair(variables[i], variables[j], parts)
    found = program.solve(budget, few.contention if overlaps else None, units)
    if found is None:
        return None
    return tuple(int(choices[int(np.argmax(found[numbers]))]) for choices, numbers in zip(kept, variables))


@dataclass
class _Program:
    """Columns with their parts of the step, and equations.

    Attributes:
        parts: blocks of columns, ``[part, column]``: the parts of the model and then bytes sent.
        rows: per equation the columns that add up, those that they equal, and a constant.
        whole: per block, whether its columns are binaries.
    """

    parts: list[np.ndarray] = field(default_factory=list)
    rows: list[tuple[np.ndarray, np.ndarray, float]] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    count: int = 0

    def variable(self, parts: np.ndarray) -> np.ndarray:
        """Columns of a variable, one for each of its choices."""
        numbers = self._block(parts, whole=True)
        self.rows.append((numbers, numbers[:0], 1.0))
        return numbers

    def pair(self, first: np.ndarray, second: np.ndarray, parts: np.ndarray) -> None:
        """Columns of a pair of variables, one for each pair of their choices."""
        numbers = self._block(parts.reshape(5, -1), whole=False).reshape(len(first), len(second))
        self.rows += [(numbers[a], first[a : a + 1], 0.0) for a in range(len(first))]
        self.rows += [(numbers[:, b], second[b : b + 1], 0.0) for b in range(len(second))]

    def solve(
        self, budget: float | None, contention: float | None, units: tuple[float, float, float]
    ) -> np.ndarray | None:
        """Values of the columns in the best solution; without contention nothing runs beside compute."""
        from scipy import sparse  # takes a third of a second: only where placements are searched
        from scipy.optimize import Bounds, LinearConstraint, milp

        parts = np.concatenate(self.parts, axis=1)
        possible = np.isfinite(parts).all(axis=0) & (parts[:MEMORY] < IMPOSSIBLE).all(axis=0)
        seconds, sent, held = (unit or 1.0 for unit in units)
        compute, exposed, hidden, memory, sending = (
            np.where(possible, part, 0.0) / unit for part, unit in zip(parts, (seconds, seconds, seconds, held, sent))
        )
        bytes_worth = _BYTES_WORTH * (sending + memory)
        equations, constants = self._equations()
        rows, low, high = [equations], [constants], [constants]
        # The last column: the longer of both.
        if contention is not None:
            longer = np.stack([compute + contention * hidden, hidden])
            rows.append(sparse.hstack([sparse.csr_matrix(longer), [[-1.0], [-1.0]]]))
            low.append(np.full(2, -np.inf))
            high.append(np.zeros(2))
        else:
            exposed = exposed + compute + hidden
        if budget is not None:
            rows.append(sparse.csr_matrix(np.append(memory, 0.0)))
            low.append(np.array([-np.inf]))
            high.append(np.array([budget / held]))
        result = milp(
            np.append(exposed + bytes_worth, 1.0),
            constraints=LinearConstraint(sparse.vstack(rows, format="csr"), np.concatenate(low), np.concatenate(high)),
            bounds=Bounds(np.zeros(self.count + 1), np.append(possible.astype(float), np.inf)),
            integrality=np.append(np.repeat(self.whole, [block.shape[1] for block in self.parts]), False),
            options={"node_limit": _NODES, "mip_rel_gap": _GAP},
        )
        return result.x

    def _block(self, parts: np.ndarray, whole: bool) -> np.ndarray:
        self.parts.append(parts)
        self.whole.append(whole)
        self.count += parts.shape[1]
        return np.arange(self.count - parts.shape[1], self.count)

    def _equations(self) -> tuple[sparse.csr_matrix, np.ndarray]:
        from scipy import sparse

        entries = [(np.concatenate(row[:2]), len(row[0])) for row in self.rows]
        values = np.concatenate([np.where(np.arange(len(numbers)) < n, 1.0, -1.0) for numbers, n in entries])
        at = np.repeat(np.arange(len(entries)), [len(numbers) for numbers, _ in entries])
        numbers = np.concatenate([numbers for numbers, _ in entries])
        shape = (len(entries), self.count + 1)
        return sparse.csr_matrix((values, (at, numbers)), shape), np.array([row[2] for row in self.rows])
