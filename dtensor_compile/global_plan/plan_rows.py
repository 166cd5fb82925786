"""A chosen plan call by call: placements, what is redistributed, and what each class of calls costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

from dtensor_compile.compat.dtensor.rules.operator_strategies import Placements, Strategy
from dtensor_compile.global_plan.choose_placements import Choice
from dtensor_compile.global_plan.connect_calls import taken_from
from dtensor_compile.global_plan.cost_model import Variable
from dtensor_compile.global_plan.equal_calls import pattern
from dtensor_compile.global_plan.step_variables import StepVariables
from dtensor_compile.ir.spec import spec_text


class Move(NamedTuple):
    """A redistribution, of all calls of a row: seconds, bytes that a rank sends, and whether it can run beside
    compute."""

    what: str
    before: str
    after: str
    seconds: float
    sent: float
    hidden: bool


@dataclass(frozen=True)
class PlanRow:
    """A parameter, an input, or a class of equal calls.

    Attributes:
        kind: that of its `Variable`.
        name: of a parameter or input; of a call its operator.
        module: path of its module, with ``*`` for equal blocks.
        phase: of a call.
        count: calls, or tensors.
        inputs, outputs: placements of its tensors.
        compute: seconds of all calls.
        memory: bytes that it holds: of a parameter with its gradient and optimizer states, of a call for the backward
            pass.
        moves: redistributions of what it takes, and of gradients that it makes.
    """

    kind: str
    name: str
    module: str
    phase: str
    count: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compute: float
    memory: float
    moves: tuple[Move, ...] = ()

    @property
    def exposed(self) -> float:
        """Seconds of communication in the way of compute."""
        return sum(move.seconds for move in self.moves if not move.hidden)

    @property
    def hidden(self) -> float:
        """Seconds of communication that can run beside compute."""
        return sum(move.seconds for move in self.moves if move.hidden)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        return sum(move.sent for move in self.moves)

    @property
    def placed(self) -> str:
        """As ``R, S(0) -> S(0)``."""
        return f"{'; '.join(self.inputs)} -> {'; '.join(self.outputs)}" if self.inputs else "; ".join(self.outputs)


class _Moves:
    """Redistributions of a choice by variable; equal ones are summed."""

    def __init__(self, variables: StepVariables, choice: Sequence[int]) -> None:
        self.variables, self.choice = variables, choice
        self.found: dict[int, dict[tuple[str, str, str, bool], list[float]]] = defaultdict(dict)

    def add(self, variable: int, what: str, number: int, before: Placements, after: Placements, hidden: bool) -> None:
        """One redistribution of a tensor."""
        if before == after:
            return
        costs = self.variables.costs
        size = self.variables.step.tensors[number].nbytes
        seconds, sent = costs.between(costs.codes([before]), costs.codes([after]), size)
        key = what, spec_text(before), spec_text(after), hidden
        total = self.found[variable].setdefault(key, [0.0, 0.0])
        total[0] += float(seconds[0, 0])
        total[1] += float(sent[0, 0])

    def comes(self, number: int) -> Placements:
        """The placements in which a tensor comes."""
        return self.variables.placements_of(self.choice, number)

    def of(self, variable: int) -> tuple[Move, ...]:
        """Those of a variable."""
        return tuple(
            Move(what, before, after, seconds, sent, hidden)
            for (what, before, after, hidden), (seconds, sent) in self.found[variable].items()
        )


def plan_rows(variables: StepVariables, choice: Choice) -> list[PlanRow]:
    """The rows of a chosen plan: parameters and inputs, then calls in the order of the step.

    Sums over them are those of the choice: compute, exposed and hidden seconds, bytes sent and held.
    """
    moves, saved = _all_moves(variables, choice.choice), _saved_copies(variables, choice.choice)
    rows = []
    for number in variables.model.order():
        variable, x = variables.model.variables[number], choice.choice[number]
        if variable.kind != "shared":
            inputs, outputs = _placed(variable, x)
            compute, memory = (float(costs[number][x]) for costs in (variables.model.compute, variables.model.memory))
            rows.append(
                PlanRow(
                    variable.kind, variable.name, variable.module, variable.phase, variable.count, inputs, outputs,
                    compute, memory + saved[number], moves.of(number),
                )
            )  # fmt: skip
    return sorted(rows, key=lambda row: row.kind in ("call", "result"))


def _saved_copies(variables: StepVariables, choice: Sequence[int]) -> dict[int, float]:
    """Bytes of redistributed copies that are held for the backward pass, by the variable that makes views of them."""
    found: dict[int, float] = defaultdict(float)
    for (i, j), pair in variables.model.pairs.items():
        held = float(pair.memory[choice[i], choice[j]])
        if held:
            found[i if i in variables.saved_views else j] += held
    return found


def _placed(variable: Variable, x: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    made = variable.choices[x]
    if isinstance(made, Strategy):
        return tuple(map(spec_text, made.inputs)), tuple(map(spec_text, made.outputs))
    return (), (spec_text(cast("Placements", made)),)


def _all_moves(variables: StepVariables, choice: Sequence[int]) -> _Moves:
    step, moves = variables.step, _Moves(variables, choice)
    for number, call in enumerate(step.calls):
        strategy, taken = variables.strategy(choice, number), taken_from(variables, choice, number)
        for place, (tensor, want) in enumerate(zip(call.inputs, strategy.inputs)):
            before, hidden = taken[place] or moves.comes(tensor), tensor in variables.only_parameters
            moves.add(variables.of_call[number], f"argument {place}", tensor, before, want, hidden)
    _add_shared(variables, choice, moves)
    for name, tensor in step.gradients.items():
        made, parameter = moves.comes(tensor), moves.comes(step.parameters[name])
        what = f"gradient of {pattern(name)}"
        moves.add(variables.sources[tensor].variable, what, tensor, made, parameter, True)
    results = [i for i, variable in enumerate(variables.model.variables) if variable.kind == "result"]
    for variable, tensor in zip(results, dict.fromkeys(step.results.get("", ()))):
        after = cast("Placements", variables.model.variables[variable].choices[choice[variable]])
        moves.add(variable, "result", tensor, moves.comes(tensor), after, False)
    return moves


def _add_shared(variables: StepVariables, choice: Sequence[int], moves: _Moves) -> None:
    """Redistributions for several calls: rows of the first of them."""
    done: set[tuple[int, str]] = set()
    for number, call in enumerate(variables.step.calls):
        for tensor in call.inputs:
            key = tensor, call.phase
            if key in variables.shared and key not in done:
                done.add(key)
                shared = variables.shared[key]
                first, second = variables.shared_pair(choice, shared)
                hidden = tensor in variables.only_parameters
                moves.add(variables.of_call[number], "for several calls", tensor, first, second, hidden)


class RowDifference(NamedTuple):
    """A row of two plans that is not the same in both; None where a plan has no such row."""

    before: PlanRow | None
    after: PlanRow | None

    @property
    def seconds(self) -> float:
        """How many more seconds it takes after than before, hidden communication included."""
        return _seconds(self.after) - _seconds(self.before)


def _seconds(row: PlanRow | None) -> float:
    return 0.0 if row is None else row.compute + row.exposed + row.hidden


def differences(before: Sequence[PlanRow], after: Sequence[PlanRow]) -> list[RowDifference]:
    """Rows that are not placed or redistributed in the same way, in the order of the step."""
    rows = [_by_place(before), _by_place(after)]
    found = [RowDifference(rows[0].get(key), rows[1].get(key)) for key in dict.fromkeys([*rows[1], *rows[0]])]
    return [this for this in found if _placing(this.before) != _placing(this.after)]


def _by_place(rows: Sequence[PlanRow]) -> dict[object, PlanRow]:
    """Rows by what they are, and their place among those that are the same."""
    seen: dict[object, int] = defaultdict(int)
    found: dict[object, PlanRow] = {}
    for row in rows:
        key = row.kind, row.name, row.module, row.phase
        found[(*key, seen[key])] = row
        seen[key] += 1
    return found


def _placing(row: PlanRow | None) -> object:
    return row and (row.inputs, row.outputs, [(move.what, move.before, move.after) for move in row.moves])


def row_values(row: PlanRow) -> dict[str, Any]:
    """Plain values of a row, for JSON."""
    return {**asdict(row), "moves": [move._asdict() for move in row.moves]}


def row_of_values(values: Mapping[str, Any]) -> PlanRow:
    """The row with these plain values."""
    lists = {name: tuple(values[name]) for name in ("inputs", "outputs")}
    return PlanRow(**{**values, **lists, "moves": tuple(Move(**move) for move in values["moves"])})
