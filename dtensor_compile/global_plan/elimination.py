"""Exact minimization of a `PairwiseProblem` by elimination of one variable after the other.

A variable and its neighbors make a table of costs by the neighbors' choices alone, with the best of its own choices in
each entry. A tree, a chain of blocks or any graph of small treewidth is solved exactly in this way; the variable whose
table is smallest goes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from dtensor_compile.global_plan.pairwise_problem import PairwiseProblem

#: Entries of a table at most (of 8 bytes each).
MOST_ENTRIES = 1 << 23

_Table = tuple[tuple[int, ...], np.ndarray]


def eliminate(problem: PairwiseProblem, most: int = MOST_ENTRIES) -> list[int] | None:
    """The best choices; None if a table would have more than `most` entries."""
    sizes = [len(costs) for costs in problem.own]
    order = _order(sizes, problem.pairs, most)
    if order is None:
        return None
    tables: list[_Table] = [((i,), np.asarray(costs, float)) for i, costs in enumerate(problem.own)]
    tables += [((i, j), np.asarray(costs, float)) for (i, j), costs in problem.pairs.items()]
    done: list[tuple[int, list[int], np.ndarray]] = []
    for i, around in order:
        table = _joined([t for t in tables if i in t[0]], [*around, i], sizes)
        tables = [t for t in tables if i not in t[0]]
        tables.append((tuple(around), table.min(axis=-1)))
        done.append((i, around, table.argmin(axis=-1)))
    choice = [0] * len(sizes)
    for i, around, best in reversed(done):
        choice[i] = int(best[tuple(choice[j] for j in around)])
    return choice


def _order(sizes: Sequence[int], pairs: Iterable[tuple[int, int]], most: int) -> list[tuple[int, list[int]]] | None:
    """Variables in the order of elimination, each with its neighbors then; None if a table would be too large."""
    near: list[set[int]] = [set() for _ in sizes]
    for i, j in pairs:
        near[i].add(j)
        near[j].add(i)

    def entries(i: int) -> int:
        return sizes[i] * math.prod(sizes[j] for j in near[i])

    left, order = {i: entries(i) for i in range(len(sizes))}, []
    while left:
        i = min(left, key=lambda i: (left[i], i))
        if left.pop(i) > most:
            return None
        order.append((i, sorted(near[i])))
        for j in near[i]:
            near[j] |= near[i]
            near[j] -= {i, j}
        left.update((j, entries(j)) for j in near[i])
    return order


def _joined(tables: Sequence[_Table], variables: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """The sum of tables as one over `variables`."""
    total = np.zeros([sizes[i] for i in variables])
    for scope, table in tables:
        order = sorted(range(len(scope)), key=lambda k: variables.index(scope[k]))
        shape = [sizes[i] if i in scope else 1 for i in variables]
        total += np.transpose(table, order).reshape(shape)
    return total
