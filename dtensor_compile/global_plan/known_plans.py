"""Plans as people write them, each the best of its kind by the costs of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from torch.distributed.tensor import Replicate, Shard

from dtensor_compile.compat.dtensor.rules.operator_strategies import Placements
from dtensor_compile.global_plan.choose_placements import Choice, choose_restricted
from dtensor_compile.global_plan.cost_model import Variable
from dtensor_compile.global_plan.step_variables import StepVariables


@dataclass(frozen=True)
class Alternative:
    """A condition and the best plan under it.

    Attributes:
        name: placements of a value, or of a whole plan.
        choice: estimates; None where no plan satisfies the condition.
        chosen: whether the plan itself satisfies it.
    """

    name: str
    choice: Choice | None
    chosen: bool = False


class _Kind(NamedTuple):
    """A kind of plan: placements of inputs, and a condition on those of parameters."""

    name: str
    inputs: Placements
    parameters: Callable[[Placements], bool]


def _kinds(names: Sequence[str]) -> list[_Kind]:
    ndim = len(names)
    batch, replicated = (Shard(0),) * ndim, (Replicate(),) * ndim
    found = [
        _Kind("data parallel", batch, lambda p: p == replicated),
        _Kind("fully_shard", batch, lambda p: p == batch),
    ]
    if ndim == 1:
        return [*found, _Kind("tensor parallel", replicated, lambda p: True)]
    outer, inner = (*batch[1:], Replicate()), f"tensor parallel over {names[-1]}"
    over = ", ".join(names[:-1])
    return [
        *found,
        _Kind(f"data parallel over {over} x {inner}", outer, lambda p: p[:-1] == replicated[1:]),
        _Kind(f"fully_shard over {over} x {inner}", outer, lambda p: p[:-1] == batch[1:]),
    ]


def known_names(names: Sequence[str]) -> list[str]:
    """Names of the kinds of plans for a mesh with dims of these names."""
    return [kind.name for kind in _kinds(names)]


def known_plans(variables: StepVariables, names: Sequence[str], budget: float | None) -> list[Alternative]:
    """The best plans of the kinds that people write.

    Data parallel, `fully_shard` over all mesh dims, tensor parallel over the last mesh dim, and `fully_shard` over the
    others with it. A parameter whose sizes do not allow what its kind wants is placed freely; an input makes the kind
    impossible.

    Args:
        variables: of the step.
        names: of the mesh dims.
        budget: bytes that a rank may hold.
    """
    return [Alternative(kind.name, _best(variables, kind, budget)) for kind in _kinds(names)]


def _best(variables: StepVariables, kind: _Kind, budget: float | None) -> Choice | None:
    kept: dict[int, list[int]] = {}
    for number, variable in enumerate(variables.model.variables):
        if variable.kind == "input":
            kept[number] = _satisfying(variable, lambda p: p == kind.inputs)
            if not kept[number]:
                return None
        elif variable.kind == "parameter" and (left := _satisfying(variable, kind.parameters)):
            kept[number] = left
    choice = choose_restricted(variables.model, kept, budget)
    return choice if choice.possible else None


def _satisfying(variable: Variable, condition: Callable[[Placements], bool]) -> list[int]:
    return [x for x, placements in enumerate(variable.choices) if condition(cast("Placements", placements))]
