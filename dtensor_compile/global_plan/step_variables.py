"""The variables of a recorded step, with the seconds and the memory of their choices; pairs are `connect_calls`'s."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch.distributed.tensor import Replicate

from dtensor_compile.compat.dtensor.rules.factors import tensor_leaves
from dtensor_compile.compat.dtensor.rules.operator_strategies import Placements, Strategy
from dtensor_compile.compat.dtensor.step_record import BACKWARD, FORWARD, RecordedStep, StepCall
from dtensor_compile.global_plan.candidates import Candidates, is_view, sharded_dim
from dtensor_compile.global_plan.cost_model import CostModel, Variable, local_bytes
from dtensor_compile.global_plan.equal_calls import classes_of_calls, classes_of_tensors, pattern
from dtensor_compile.global_plan.redistribution_costs import RedistributionCosts
from dtensor_compile.graph.node_costs import flops_of_call, kind_of_call
from dtensor_compile.topology.links import Device, compute_seconds


@dataclass(frozen=True)
class CostSettings:
    """What the costs of a step depend on besides its calls.

    Attributes:
        device: that computes.
        states: bytes of gradient and optimizer states for each byte of a parameter.
        fixed: placements of parameters, buffers and inputs (``"0"``, ``"1"``, ...) that stay as they are.
    """

    device: Device
    states: float = 3.0
    fixed: Mapping[str, Placements] = field(default_factory=dict)


@dataclass
class TensorSource:
    """Where a tensor comes from: a variable, which of its results, and the numbers of the placements of each choice."""

    variable: int
    place: int
    placements: np.ndarray


class StepVariables:
    """Variables of one step, in `model`.

    Attributes:
        of_call: per call its variable.
        of_tensor: of parameters and inputs, by number of the tensor, their variable.
        sources: of each tensor, by its number.
        strategies: of calls, by variable.
        shared: by number of a tensor and phase, the variable of what its calls share.
        stays: tensors that calls must read as they come (`RecordedStep.stays`).
        only_parameters: numbers of tensors that are computed from parameters alone.
        saved_views: of calls that make a view of a parameter, buffer or input for the backward pass, by variable, the
            bytes of their choices: they are held if the view is one of a redistributed copy.
    """

    def __init__(
        self, step: RecordedStep, candidates: Candidates, costs: RedistributionCosts, settings: CostSettings
    ) -> None:
        self.step, self.candidates, self.costs, self.settings = step, candidates, costs, settings
        self.model = CostModel(contention=settings.device.contention)
        self.of_call: list[int] = []
        self.of_tensor: dict[int, int] = {}
        self.shared: dict[tuple[int, str], int] = {}
        self.sources: dict[int, TensorSource] = {}
        self.strategies: dict[int, Sequence[Strategy]] = {}
        self.only_parameters: set[int] = set()
        self.saved_views: dict[int, np.ndarray] = {}
        self.stays = step.stays()
        self._add_given()
        self._add_calls()

    def _add_given(self) -> None:
        """Variables of parameters, buffers and inputs. Buffers are replicated, unless they are fixed otherwise."""
        step = self.step
        inputs = {str(i): number for i, number in enumerate(step.inputs)}
        for kind, names in (("parameter", step.parameters), ("buffer", step.buffers), ("input", inputs)):
            classes = classes_of_tensors(step, names)
            counts = Counter(key for name, key in classes.items() if name not in self.settings.fixed)
            known: dict[str, int] = {}
            for name, number in names.items():
                fixed = self.settings.fixed.get(name)
                key = classes[name] if fixed is None else name
                if key not in known:
                    tensor = step.tensors[number]
                    choices = (fixed,) if fixed else self.candidates.of_tensor(tensor, kind != "buffer")
                    count = counts[key] if fixed is None else 1
                    known[key] = self.model.add(Variable(kind, key, key.rpartition(".")[0], FORWARD, choices, count))
                    states = self.settings.states if kind == "parameter" and tensor.requires_grad else 0.0
                    held = [local_bytes(tensor, placements, self.costs.mesh_shape) for placements in choices]
                    self.model.memory[known[key]] += count * (1.0 + states) * np.array(held)
                self._given(number, known[key], self.model.variables[known[key]].choices, kind == "parameter")

    def _given(self, number: int, variable: int, choices: Any, is_parameter: bool) -> None:
        self.of_tensor[number] = variable
        self.sources[number] = TensorSource(variable, 0, self.costs.codes(choices))
        if is_parameter:
            self.only_parameters.add(number)

    def _add_calls(self) -> None:
        """Variables of classes of calls, and the seconds of their strategies."""
        classes = classes_of_calls(self.step)
        counts = Counter(classes)
        variables: dict[int, int] = {}
        saved, in_place = self._saved(), {call for call, _ in self.stays}
        given_memory, mesh_shape = {self.step.memory[x] for x in self.of_tensor}, self.costs.mesh_shape
        for call, number in zip(self.step.calls, classes):
            given = tuple(self._placements(x) for x in call.inputs)
            if number not in variables:
                strategies = self._choices(len(self.of_call), call, given)
                at = len(self.of_call)
                for source in (self.sources[x].variable for x in call.inputs):
                    if self.model.variables[source].kind != "call" and self.model.variables[source].at == 0:
                        self.model.variables[source].at = at - 0.5
                made = Variable("call", call.name, pattern(call.module), call.phase, strategies, counts[number], at)
                variables[number] = self.model.add(made)
                self.strategies[variables[number]] = strategies
                self._add_work(variables[number], call, counts[number])
            variable = variables[number]
            self.of_call.append(variable)
            if all(x in self.only_parameters for x in call.inputs) and call.inputs:
                self.only_parameters.update(call.outputs)
            for place, output in enumerate(call.outputs):
                made_in = [strategy.outputs[place] for strategy in self.strategies[variable]]
                if (pinned := self.step.pinned.get(output)) is not None:
                    self._pin(variable, output, made_in, pinned, len(self.of_call) - 1 in in_place)
                    made_in = [pinned] * len(made_in)
                self.sources[output] = TensorSource(variable, place, self.costs.codes(made_in))
                if output in saved:
                    held = np.array([local_bytes(self.step.tensors[output], p, mesh_shape) for p in made_in])
                    if is_view(call) and self.step.memory[output] in given_memory:
                        self.saved_views[variable] = held
                    else:
                        self.model.memory[variable] += held

    def strategy(self, choice: Sequence[int], call: int) -> Strategy:
        """The strategy of a call in a choice for each variable."""
        return self.strategies[self.of_call[call]][choice[self.of_call[call]]]

    def shared_pair(self, choice: Sequence[int], variable: int) -> tuple[Placements, Placements]:
        """The placements in which a shared tensor comes, and those in which it is made available besides."""
        return cast("tuple[Placements, Placements]", self.model.variables[variable].choices[choice[variable]])

    def placements_of(self, choice: Sequence[int], tensor: int) -> Placements:
        """The placements in which a tensor comes in a choice for each variable."""
        source = self.sources[tensor]
        return self.costs.placements[int(source.placements[choice[source.variable]])]

    def _choices(self, number: int, call: StepCall, given: Sequence[tuple[Placements, ...]]) -> tuple[Strategy, ...]:
        """The strategies of a call: the one that it keeps, or all that it can have, that of its recording included."""
        kept, taken = self.step.kept.get(number), self.step.taken.get(number)
        if kept is not None:
            return (kept,)
        found = self.candidates.of_call(call, given)
        if any(x in self.step.varying for x in (*call.inputs, *call.outputs)):
            found = tuple(strategy for strategy in found if not self._cuts_varying(call, strategy))
        return found if taken is None or taken in found else (*found, taken)

    def _cuts_varying(self, call: StepCall, strategy: Strategy) -> bool:
        """Whether a strategy shards a dim with a symbolic size, whose shards may be uneven."""
        placed = *zip(call.inputs, strategy.inputs), *zip(call.outputs, strategy.outputs)
        return any(sharded_dim(p) in self.step.varying.get(x, ()) for x, placements in placed for p in placements)

    def _pin(
        self, variable: int, number: int, made_in: Sequence[Placements], pinned: Placements, in_place: bool
    ) -> None:
        """Adds the redistribution of a result to the placements in which it is read outside of the calls.

        Args:
            in_place: whether the result has memory that is written to, so that a redistributed one would be another.
        """
        have, want = self.costs.codes(made_in), self.costs.codes([pinned])
        size = self.step.tensors[number].nbytes
        costs = self.costs.unmoved(have, want) if in_place else self.costs.between(have, want, size)
        both = [np.where(np.eye(len(made_in), dtype=bool), part, 0.0) for part in costs]
        self.model.add_pair(variable, variable, both[0], both[1], number in self.step.leaf_gradients)

    def _placements(self, number: int) -> tuple[Placements, ...]:
        """The placements in which a tensor can come; constants are replicated."""
        if number not in self.sources:
            came = self.step.came.get(number, (Replicate(),) * len(self.costs.mesh_shape))
            variable = self.model.add(Variable("constant", str(number), "", FORWARD, (came,)))
            self.sources[number] = TensorSource(variable, 0, self.costs.codes([came]))
        return tuple(self.costs.placements[code] for code in np.unique(self.sources[number].placements))

    def _add_work(self, variable: int, call: StepCall, count: int) -> None:
        device, mesh_shape = self.settings.device, self.costs.mesh_shape
        if is_view(call):
            return
        flops, kind = flops_of_call(call.op, call.args, call.result, call.kwargs), ""
        if flops:
            kind = kind_of_call(call.op, call.args, call.kwargs)
        tensors, results = tensor_leaves((call.args, call.kwargs)), tensor_leaves(call.result)
        took = []
        for strategy in self.strategies[variable]:
            placed = [*zip(tensors, strategy.inputs), *zip(results, strategy.outputs)]
            moved = sum(local_bytes(tensor, placements, mesh_shape) for tensor, placements in placed)
            shared = math.prod(
                n for i, n in enumerate(mesh_shape) if any(sharded_dim(p[i]) is not None for _, p in placed)
            )
            itemsize = results[0].element_size()
            took.append(compute_seconds(device, flops // shared, int(moved), itemsize, fused=not flops, kind=kind))
        self.model.compute[variable] += count * np.array(took)

    def _saved(self) -> set[int]:
        """Tensors of the forward pass that the backward pass reads; of views of one memory, the first."""
        made = {x: call for call in self.step.calls if call.phase == FORWARD for x in call.outputs}
        memory: dict[int, int] = {}
        for call in self.step.calls:
            for x in call.inputs if call.phase == BACKWARD else ():
                if x in made:
                    memory.setdefault(self.step.tensors[x].untyped_storage()._cdata, x)
        return set(memory.values())
