"""What a choice of placements costs: the variables of a step, and the costs of their choices and of pairs of them.

Variables:

- a parameter, a buffer or an input: its placements. It costs its memory; a parameter also that of its gradient and
  optimizer states.
- a class of equal calls: one of its strategies. It costs the seconds of the roofline on shards, and the memory of what
  it makes in the forward pass for the backward pass.
- a result of the model: placements that are not partial, for the program to use.
- a tensor that several calls use, once for each phase: the placements in which it comes and a second one in which it is
  made available to all of them, so that calls share a redistribution.

Pairs: the redistribution from what a variable makes to what the other wants, in seconds, times the number of calls; of
a gradient, to the placements of its parameter. A redistribution of a parameter alone, or of a gradient to its
parameter, can be hidden behind compute; all others are in the way of it:

    step = exposed + max(compute + contention * hidden, hidden)

with ``compute``, ``exposed`` and ``hidden`` the sums over the step, in seconds, and ``contention`` what compute loses
for each second of communication beside it (`Device.contention`). It is a lower bound on what a schedule can reach, and
what `choose_placements` minimizes; memory has a price per byte beyond the budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dtensor_compile.compat.dtensor.rules.operator_strategies import Placements, Strategy
from dtensor_compile.global_plan.pairwise_problem import IMPOSSIBLE, PairwiseProblem
from dtensor_compile.planner.shard_intervals import is_cut

#: Numbers of the parts of a cost.
COMPUTE, EXPOSED, HIDDEN, MEMORY = range(4)


@dataclass
class Variable:
    """Something that has a choice.

    Attributes:
        kind: ``"parameter"``, ``"buffer"``, ``"input"``, ``"constant"``, ``"call"``, ``"shared"`` or ``"result"``.
        name: of a parameter or input; of a call its operator.
        module: path of its module, with ``*`` for equal blocks.
        phase: of a call or a shared tensor.
        choices: placements of a parameter or input; strategies of a call; pairs of placements of a shared tensor.
        count: tensors or calls of this class.
        at: position in the step, for the order in which messages are passed.
    """

    kind: str
    name: str
    module: str
    phase: str
    choices: Sequence[Placements | Strategy | tuple[Placements, Placements]]
    count: int = 1
    at: float = 0.0


@dataclass
class PairCost:
    """Costs of a pair of variables.

    Attributes:
        exposed, hidden: seconds of redistributions that are in the way of compute, and of those that are not.
        sent: bytes that a rank sends.
        memory: bytes that a rank holds for the backward pass because of a redistribution.
    """

    exposed: np.ndarray
    hidden: np.ndarray
    sent: np.ndarray
    memory: np.ndarray

    def restricted(self, rows: Sequence[int], columns: Sequence[int]) -> PairCost:
        """Of some choices of both."""
        part = np.ix_(rows, columns)
        return PairCost(self.exposed[part], self.hidden[part], self.sent[part], self.memory[part])


@dataclass
class CostModel:
    """Variables in the order of the step, and their costs.

    Attributes:
        variables: all of them.
        compute, memory: per variable, seconds and bytes of its choices.
        pairs: by numbers of variables, the first smaller.
        contention: seconds of compute lost for each second of hidden communication.
    """

    variables: list[Variable] = field(default_factory=list)
    compute: list[np.ndarray] = field(default_factory=list)
    memory: list[np.ndarray] = field(default_factory=list)
    pairs: dict[tuple[int, int], PairCost] = field(default_factory=dict)
    contention: float = 0.0

    def add(self, variable: Variable) -> int:
        """Adds a variable without costs; returns its number."""
        self.variables.append(variable)
        self.compute.append(np.zeros(len(variable.choices)))
        self.memory.append(np.zeros(len(variable.choices)))
        return len(self.variables) - 1

    def add_pair(self, i: int, j: int, seconds: np.ndarray, sent: np.ndarray, hidden: bool) -> None:
        """Adds costs ``[choice of i, choice of j]``; of a variable with itself, to its own."""
        if i > j:
            i, j, seconds, sent = j, i, seconds.T, sent.T
        zero = np.zeros((len(self.variables[i].choices), len(self.variables[j].choices)))
        known = self.pairs.setdefault((i, j), PairCost(zero, zero, zero, zero))
        if hidden:
            known.hidden = known.hidden + seconds
        else:
            known.exposed = known.exposed + seconds
        known.sent = known.sent + sent

    def add_pair_memory(self, i: int, j: int, memory: np.ndarray) -> None:
        """Adds bytes ``[choice of i, choice of j]`` to a pair that has costs."""
        if i > j:
            i, j, memory = j, i, memory.T
        self.pairs[i, j].memory = self.pairs[i, j].memory + memory

    def parts(self, choice: Sequence[int]) -> np.ndarray:
        """Seconds of compute, exposed and hidden communication, and bytes of memory, of a choice for each variable."""
        total = np.zeros(4)
        for x, compute, memory in zip(choice, self.compute, self.memory):
            total[COMPUTE] += compute[x]
            total[MEMORY] += memory[x]
        for (i, j), pair in self.pairs.items():
            total[EXPOSED] += pair.exposed[choice[i], choice[j]]
            total[HIDDEN] += pair.hidden[choice[i], choice[j]]
            total[MEMORY] += pair.memory[choice[i], choice[j]]
        return total

    def sent(self, choice: Sequence[int]) -> float:
        """Bytes that a rank sends in a step."""
        return float(sum(pair.sent[choice[i], choice[j]] for (i, j), pair in self.pairs.items()))

    def restricted(self, kept: Mapping[int, Sequence[int]]) -> CostModel:
        """The model in which some variables have only some of their choices.

        Args:
            kept: by number of a variable, the numbers of the choices that it keeps.
        """
        every = [list(kept.get(i, range(len(v.choices)))) for i, v in enumerate(self.variables)]
        return CostModel(
            [replace(v, choices=[v.choices[x] for x in left]) for v, left in zip(self.variables, every)],
            [costs[left] for costs, left in zip(self.compute, every)],
            [costs[left] for costs, left in zip(self.memory, every)],
            {(i, j): pair.restricted(every[i], every[j]) for (i, j), pair in self.pairs.items()},
            self.contention,
        )

    def problem(self, compute: float, hidden: float, price: float) -> PairwiseProblem:
        """The problem with weighted sums as its cost, in the order of `order`.

        Args:
            compute: weight of the seconds of compute.
            hidden: weight of the seconds of hidden communication; exposed ones count in full.
            price: seconds for a byte of memory.
        """
        own = [compute * seconds + price * memory for seconds, memory in zip(self.compute, self.memory)]
        pairs: dict[tuple[int, int], np.ndarray] = {}
        places = {i: place for place, i in enumerate(self.order())}
        for (i, j), pair in self.pairs.items():
            costs = _finite(pair.exposed + hidden * pair.hidden + price * pair.memory)
            if i == j:
                own[i] = np.minimum(own[i] + costs.diagonal(), IMPOSSIBLE)
            elif places[i] < places[j]:
                pairs[places[i], places[j]] = costs
            else:
                pairs[places[j], places[i]] = costs.T
        return PairwiseProblem([own[i] for i in self.order()], pairs)

    def order(self) -> list[int]:
        """Numbers of the variables in the order of the step, as `problem` has them."""
        return sorted(range(len(self.variables)), key=lambda i: (self.variables[i].at, i))


def _finite(costs: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(costs), np.minimum(costs, IMPOSSIBLE), IMPOSSIBLE)


def local_bytes(tensor: torch.Tensor, placements: Placements, mesh_shape: Sequence[int]) -> float:
    """Bytes of the local tensor of a rank under placements that shard evenly."""
    return tensor.nbytes / math.prod(n for placement, n in zip(placements, mesh_shape) if is_cut(placement))
