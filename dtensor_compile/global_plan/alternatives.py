"""Other placements of one value than the chosen ones: each with the best plan in which the value has them, and those
that the rules of its operators do not take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from torch.distributed.tensor import Placement

from dtensor_compile.compat.dtensor.rules.operator_strategies import Placements
from dtensor_compile.compat.dtensor.step_record import FORWARD
from dtensor_compile.errors import PlacementError
from dtensor_compile.global_plan.choose_placements import choose_restricted
from dtensor_compile.global_plan.equal_calls import pattern
from dtensor_compile.global_plan.known_plans import Alternative
from dtensor_compile.global_plan.place import PlacementPlan
from dtensor_compile.ir.spec import spec_text


def alternatives(plan: PlacementPlan, name: str) -> list[Alternative]:
    """All placements that a value can have, the best first.

    Args:
        plan: the plan.
        name: of a parameter, an input (``"0"``), or a module, whose first result is meant.

    Raises:
        PlacementError: there is no such value.
    """
    variable, placements = _value(plan, name)
    by_text: dict[str, list[int]] = {}
    for x, made in enumerate(placements):
        by_text.setdefault(spec_text(made), []).append(x)
    now = plan.choice.choice[variable]
    found = []
    for text, kept in by_text.items():
        if now in kept:
            found.append(Alternative(text, plan.choice, True))
        else:
            choice = choose_restricted(plan.variables.model, {variable: kept}, plan.budget)
            found.append(Alternative(text, choice if choice.possible else None))
    return sorted(found, key=_order)


class RefusedPlacement(NamedTuple):
    """An input of an operator in a placement over a mesh dim that none of its strategies has."""

    operator: str
    mesh_dim: str
    input: int
    placement: Placement
    reason: str


def refusals(plan: PlacementPlan, name: str) -> list[RefusedPlacement]:
    """What the rules of operators do not take: of the calls of a module, or of those that read a parameter or input.

    Raises:
        PlacementError: there is no such value.
    """
    tensor = _given(plan).get(name)
    _value(plan, name)
    found: dict[RefusedPlacement, None] = {}
    for call in plan.step.calls:
        reads = tensor in call.inputs if tensor is not None else call.module == name
        for i, dim in enumerate(plan.mesh.mesh_dim_names or ()) if reads and call.phase == FORWARD else ():
            for this in plan.variables.candidates.on_dim(call, i).refused:
                if tensor is None or call.inputs[this.input] == tensor:
                    found[RefusedPlacement(call.name, dim, this.input, this.placement, this.reason)] = None
    return list(found)


def _order(this: Alternative) -> tuple[bool, bool, bool, float]:
    choice = this.choice
    return not this.chosen, choice is None, choice is not None and not choice.fits, choice.seconds if choice else 0.0


def _value(plan: PlacementPlan, name: str) -> tuple[int, Sequence[Placements]]:
    """The variable of a value, and the placements in which each of its choices has it."""
    step, variables = plan.step, plan.variables
    given = _given(plan).get(name)
    if given is not None:
        variable = variables.of_tensor[given]
        return variable, cast("Sequence[Placements]", variables.model.variables[variable].choices)
    made, numbers = step.makers(), step.results.get(name, ())
    if not numbers or numbers[0] not in made:
        near = [path for path in (*step.parameters, *step.results) if path and pattern(path) == pattern(name)]
        advice = f"; as it, there is {near[0]}" if near else ""
        raise PlacementError(f"{name!r} is no parameter, input or module of the step{advice}")
    call, place = made[numbers[0]]
    variable = variables.of_call[call]
    return variable, [strategy.outputs[place] for strategy in variables.strategies[variable]]


def _given(plan: PlacementPlan) -> dict[str, int]:
    """Numbers of inputs, buffers and parameters by name."""
    inputs = {str(i): number for i, number in enumerate(plan.step.inputs)}
    return {**inputs, **plan.step.buffers, **plan.step.parameters}
