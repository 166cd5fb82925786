"""Costs of pairs of variables: redistributions from what one makes to what the other wants."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from dtensor_compile.compat.dtensor.rules.operator_strategies import Placements, results_known
from dtensor_compile.compat.dtensor.step_record import BACKWARD, FORWARD, RecordedStep
from dtensor_compile.global_plan.candidates import Candidates
from dtensor_compile.global_plan.cost_model import Variable
from dtensor_compile.global_plan.redistribution_costs import RedistributionCosts
from dtensor_compile.global_plan.step_variables import CostSettings, StepVariables, TensorSource
from dtensor_compile.ir.mesh import mesh_layout
from dtensor_compile.topology.network import network_of


class _Use(NamedTuple):
    """A tensor in one phase: its source, size, and the calls that use it, with the places of their arguments and
    whether they read it as it comes."""

    variable: int
    place: int
    size: int
    forward: bool
    hidden: bool
    users: tuple[tuple[int, int, bool], ...]


class _Connections:
    def __init__(self, variables: StepVariables) -> None:
        self.variables, self.model = variables, variables.model
        self.step, self.costs = variables.step, variables.costs

    def add(self) -> None:
        """Pairs of variables: calls with what they use, gradients with their parameters."""
        users: dict[tuple[int, str], list[tuple[int, int, bool]]] = defaultdict(list)
        stays = self.variables.stays
        for at, (call, variable) in enumerate(zip(self.step.calls, self.variables.of_call)):
            for place, number in enumerate(call.inputs):
                users[number, call.phase].append((variable, place, (at, place) in stays))
        groups: dict[_Use, list[int]] = defaultdict(list)
        for (number, phase), using in users.items():
            source, size = self.variables.sources[number], self.step.tensors[number].nbytes
            hidden = number in self.variables.only_parameters
            groups[_Use(source.variable, source.place, size, phase == FORWARD, hidden, tuple(using))].append(number)
        for use, numbers in groups.items():
            shared = self._connect(numbers[0], use, len(numbers))
            if shared is not None:
                phase = FORWARD if use.forward else BACKWARD
                self.variables.shared.update({(number, phase): shared for number in numbers})
        self._add_gradients()
        self._add_results()

    def _connect(self, number: int, use: _Use, count: int) -> int | None:
        """Adds the costs of a tensor's uses; returns the variable of the tensor that they share, if there is one."""
        source, using, hidden = self.variables.sources[number], use.users, use.hidden
        wanted = [self._wanted(variable, place) for variable, place, _ in using]
        if len(using) > 1:
            shared = self._shared(source, wanted, use, count)
            if shared is not None:
                variable, first, second = shared
                for (user, _, stays), want in zip(using, wanted):
                    shares = self._from_either(first, second, want, use.size)
                    self._pair(variable, user, self.costs.unmoved(first, want) if stays else shares, count, hidden)
                    self._add_saved(variable, user, first, want, count)
                return variable
        for (user, _, stays), want in zip(using, wanted):
            have = source.placements
            costs = self.costs.unmoved(have, want) if stays else self.costs.between(have, want, use.size)
            self._pair(source.variable, user, costs, count, hidden)
            self._add_saved(source.variable, user, have, want, count)
        return None

    def _add_saved(self, variable: int, user: int, have: np.ndarray, want: np.ndarray, count: int) -> None:
        """A copy that a call of `user` makes a view of for the backward pass is held."""
        held = self.variables.saved_views.get(user)
        if held is not None and variable != user:
            self.model.add_pair_memory(
                variable, user, np.where(have[:, None] == want[None, :], 0.0, count * held[None, :])
            )

    def _wanted(self, variable: int, place: int) -> np.ndarray:
        """Numbers of the placements in which the strategies of a call want an argument."""
        return self.costs.codes(strategy.inputs[place] for strategy in self.variables.strategies[variable])

    def _shared(
        self, source: TensorSource, wanted: Sequence[np.ndarray], use: _Use, count: int
    ) -> tuple[int, np.ndarray, np.ndarray] | None:
        """A variable for a tensor that several calls use, and numbers of the placements of its choices: those in which
        it comes, and those in which it is made available besides."""
        have = np.unique(source.placements)
        users = sum(np.isin(np.arange(len(self.costs.placements)), want).astype(int) for want in wanted)
        common = np.flatnonzero(users > 1)
        seconds, sent = self.costs.between(have, common, use.size)
        pays = np.isfinite(seconds) & (sent > 0) & self._near(have, common)
        if not pays.any():
            return None
        rows, columns = np.nonzero(pays)
        first, second = np.concatenate([have, have[rows]]), np.concatenate([have, common[columns]])
        took, bytes_sent = (np.concatenate([np.zeros(len(have)), cost[pays]]) for cost in (seconds, sent))
        owner, names = self.model.variables[source.variable], self.costs.placements
        pairs = [(names[p], names[q]) for p, q in zip(first, second)]
        phase = FORWARD if use.forward else BACKWARD
        made = Variable("shared", owner.name, owner.module, phase, pairs, count, self._first_use(use))
        variable = self.model.add(made)
        matches = source.placements[:, None] == first[None, :]
        costs = np.where(matches, took, math.inf), np.where(matches, bytes_sent, 0.0)
        self._pair(source.variable, variable, costs, count, use.hidden)
        return variable, first, second

    def _near(self, have: np.ndarray, want: np.ndarray) -> np.ndarray:
        """Whether a change of placements is one that calls share: to replicated or from partial over any mesh dims, or
        of one mesh dim."""
        names = self.costs.placements
        return np.array([[_is_near(names[p], names[q]) for q in want] for p in have], bool).reshape(
            len(have), len(want)
        )

    def _first_use(self, use: _Use) -> float:
        return min(self.model.variables[user].at for user, *_ in use.users) - 0.25

    def _from_either(
        self, first: np.ndarray, second: np.ndarray, want: np.ndarray, size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The cheaper way: from how a tensor comes, or from what it is made available as, by slices of it alone."""
        seconds, sent = self.costs.between(first, want, size)
        other, other_sent = self.costs.between(second, want, size)
        better = is_better(seconds, other, other_sent)
        return np.where(better, other, seconds), np.where(better, other_sent, sent)

    def _pair(self, i: int, j: int, costs: tuple[np.ndarray, np.ndarray], count: int, hidden: bool) -> None:
        self.model.add_pair(i, j, count * costs[0], count * costs[1], hidden)

    def _add_gradients(self) -> None:
        counts: Counter[tuple[int, int, int]] = Counter()
        example: dict[tuple[int, int, int], str] = {}
        for name, number in self.step.gradients.items():
            key = (
                self.variables.sources[number].variable,
                self.variables.sources[number].place,
                self.variables.of_tensor[self.step.parameters[name]],
            )
            counts[key] += 1
            example[key] = name
        for key, count in counts.items():
            number = self.step.gradients[example[key]]
            parameter = self.variables.sources[self.step.parameters[example[key]]].placements
            gradient, size = self.variables.sources[number].placements, self.step.tensors[number].nbytes
            costs = self.costs.between(gradient, parameter, size)
            self._pair(key[0], key[2], costs, count, True)

    def _add_results(self) -> None:
        """What the model returns: not partial, so that the program can use it as it is."""
        for number in dict.fromkeys(self.step.results.get("", ())):
            source, size = self.variables.sources[number], self.step.tensors[number].nbytes
            made = [self.costs.placements[code] for code in np.unique(source.placements)]
            choices = [placements for placements in made if not _partial(placements)]
            replicated: Placements = (Replicate(),) * len(self.costs.mesh_shape)
            choices = list(dict.fromkeys([*choices, replicated]))
            variable = self.model.add(Variable("result", "", "", FORWARD, choices, 1, len(self.variables.of_call)))
            costs = self.costs.between(source.placements, self.costs.codes(choices), size)
            self._pair(source.variable, variable, costs, 1, False)


def is_better(seconds: np.ndarray, other: np.ndarray, other_sent: np.ndarray) -> np.ndarray:
    """Whether what a tensor is made available as is where calls take it from: nothing is sent then."""
    return (other_sent == 0) & (other < seconds)


def _partial(placements: Placements) -> bool:
    return any(p.is_partial() for p in placements)


def _is_near(before: Placements, after: Placements) -> bool:
    changed = [(p, q) for p, q in zip(before, after) if p != q]
    return len(changed) == 1 or all(q.is_replicate() or p.is_partial() for p, q in changed)


def connected_variables(step: RecordedStep, mesh: DeviceMesh, settings: CostSettings) -> StepVariables:
    """The variables of a recorded step with the costs of all pairs, for the topology for which this thread plans.

    Args:
        mesh: to plan for; its dims have names if there are several.
    """
    costs = RedistributionCosts(tuple(mesh.shape), network_of(mesh_layout(mesh)))
    with results_known():
        variables = StepVariables(step, Candidates(mesh), costs, settings)
        _Connections(variables).add()
    return variables


def taken_from(variables: StepVariables, choice: Sequence[int], call: int) -> tuple[Placements | None, ...]:
    """For each tensor of a call, placements in which several calls have it, and from which this call takes it; None for
    those that it redistributes by itself, or not at all."""
    made, costs, strategy = variables.step.calls[call], variables.costs, variables.strategy(choice, call)
    found: list[Placements | None] = []
    for number, want in zip(made.inputs, strategy.inputs):
        shared = variables.shared.get((number, made.phase))
        if shared is None:
            found.append(None)
            continue
        first, second = variables.shared_pair(choice, shared)
        size, target = variables.step.tensors[number].nbytes, costs.codes([want])
        seconds, _ = costs.between(costs.codes([first]), target, size)
        other = costs.between(costs.codes([second]), target, size)
        found.append(second if bool(is_better(seconds, *other)[0, 0]) else None)
    return tuple(found)
