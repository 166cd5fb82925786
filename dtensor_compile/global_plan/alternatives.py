"""Other placements than the chosen ones: of one value, and of whole plans as people write them.

Each is the best plan under that condition, searched as the plan itself was, so that its difference is what the
condition costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch.distributed.tensor import Replicate, Shard

from dtensor_compile.compat.dtensor.operator_strategies import Placements, Strategy
from dtensor_compile.errors import PlacementError
from dtensor_compile.global_plan.choose_placements import Choice, choose_placements
from dtensor_compile.global_plan.cost_model import Variable
from dtensor_compile.global_plan.equal_calls import pattern
from dtensor_compile.global_plan.place import PlacementPlan
from dtensor_compile.ir.spec import spec_text


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
            choice = choose_placements(plan.variables.model.restricted({variable: kept}), plan.budget)
            found.append(Alternative(text, choice if choice.possible else None))
    return sorted(found, key=_order)


def _order(this: Alternative) -> tuple[bool, bool, bool, float]:
    choice = this.choice
    return not this.chosen, choice is None, choice is not None and not choice.fits, choice.seconds if choice else 0.0


def _value(plan: PlacementPlan, name: str) -> tuple[int, Sequence[Placements]]:
    """The variable of a value, and the placements in which each of its choices has it."""
    step, variables = plan.step, plan.variables
    inputs = {str(i): number for i, number in enumerate(step.inputs)}
    given = {**inputs, **step.buffers, **step.parameters}.get(name)
    if given is not None:
        variable = variables.of_tensor[given]
        return variable, cast("Sequence[Placements]", variables.model.variables[variable].choices)
    made = {x: (i, place) for i, call in enumerate(step.calls) for place, x in enumerate(call.outputs)}
    numbers = step.results.get(name, ())
    if not numbers or numbers[0] not in made:
        near = [path for path in (*step.parameters, *step.results) if path and pattern(path) == pattern(name)]
        advice = f"; as it, there is {near[0]}" if near else ""
        raise PlacementError(f"{name!r} is no parameter, input or module of the step{advice}")
    call, place = made[numbers[0]]
    variable = variables.of_call[call]
    strategies = cast("Sequence[Strategy]", variables.model.variables[variable].choices)
    return variable, [strategy.outputs[place] for strategy in strategies]


_Condition = Callable[[Placements], bool]


def known_plans(plan: PlacementPlan) -> list[Alternative]:
    """The best plans of the kinds that people write, where the sizes allow them.

    Data parallel, `fully_shard` over all mesh dims, tensor parallel over the last mesh dim, and `fully_shard` over the
    others with it.
    """
    ndim = plan.mesh.ndim
    names = plan.mesh.mesh_dim_names or ()
    everywhere = (Shard(0),) * ndim
    found = [
        _known(plan, "data parallel", lambda p: p == everywhere, lambda p: all(q.is_replicate() for q in p)),
        _known(plan, "fully_shard", lambda p: p == everywhere, lambda p: all(q == Shard(0) for q in p)),
    ]
    if ndim > 1:
        batch = (*(Shard(0),) * (ndim - 1), Replicate())
        outer = ", ".join(names[:-1])
        found += [
            _known(
                plan,
                f"data parallel over {outer} x tensor parallel over {names[-1]}",
                lambda p: p == batch,
                lambda p: all(q.is_replicate() for q in p[:-1]),
            ),
            _known(
                plan,
                f"fully_shard over {outer} x tensor parallel over {names[-1]}",
                lambda p: p == batch,
                lambda p: all(q == Shard(0) for q in p[:-1]),
            ),
        ]
    else:
        found.append(_known(plan, "tensor parallel", lambda p: all(q.is_replicate() for q in p), lambda p: True))
    return found


def _known(plan: PlacementPlan, name: str, of_input: _Condition, of_parameter: _Condition) -> Alternative:
    """The best plan whose inputs and parameters satisfy conditions, as far as the sizes of each allow."""
    kept: dict[int, list[int]] = {}
    for number, variable in enumerate(plan.variables.model.variables):
        condition = {"input": of_input, "parameter": of_parameter}.get(variable.kind)
        if condition is not None:
            left = _satisfying(variable, condition)
            if not left and variable.kind == "input":
                return Alternative(name, None)
            if left:
                kept[number] = left
    choice = choose_placements(plan.variables.model.restricted(kept), plan.budget)
    return Alternative(name, choice if choice.possible else None)


def _satisfying(variable: Variable, condition: _Condition) -> list[int]:
    return [x for x, placements in enumerate(variable.choices) if condition(cast("Placements", placements))]
