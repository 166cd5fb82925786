"""Forecasts of the training step of a model that is placed by a plan: the code that the backend compiles for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor.experimental import implicit_replication

from dtensor_compile.compat.dynamo.observers.observe import uncompiled
from dtensor_compile.forecast.forecast import make_plan
from dtensor_compile.forecast.step_plan import StepPlan
from dtensor_compile.forecast.training import StepSettings, Training
from dtensor_compile.global_plan.choose_placements import Choice
from dtensor_compile.global_plan.place import PlacementPlan
from dtensor_compile.report.run_target import Job, mesh_of
from dtensor_compile.report.target import TargetError, TargetProgram


@dataclass(frozen=True)
class Forecast:
    """A plan by name, with the forecast of its step; `failed` says why there is none."""

    name: str
    plan: StepPlan | None
    failed: str = ""


@dataclass(frozen=True)
class PlacedTarget:
    """A target whose model is placed: what `make_plan` needs besides the placements."""

    target: str
    job: Job
    gpu: str
    cluster: str | None
    settings: StepSettings
    arguments: Mapping[str, Any]

    def forecast(self, name: str, plan: PlacementPlan, choice: Choice) -> Forecast:
        """The forecast of the step with the placements of a choice."""
        return self._made(name, self.target, _placed(plan.with_choice(choice), self))

    def own(self, target: str) -> Forecast:
        """The forecast of another target, which distributes its model itself."""
        return self._made(target, target, None)

    def _made(self, name: str, target: str, prepare: Callable[[Training], Training] | None) -> Forecast:
        try:
            plan = make_plan(
                target,
                self.job,
                gpu=self.gpu,
                cluster=self.cluster,
                settings=self.settings,
                arguments=self.arguments,
                prepare=prepare,
            )
        except TargetError as error:
            return Forecast(name, None, str(error))
        return Forecast(name, plan)


def _placed(plan: PlacementPlan, this: PlacedTarget) -> Callable[[Training], Training]:
    """Distributes the model and its inputs, and compiles the model with its loss, which reads distributed results."""

    def prepare(training: Training) -> Training:
        on_gpu = replace(plan, mesh=mesh_of(this.job, "cuda"))
        program = training.program
        model = on_gpu.apply(uncompiled(program.model))
        args, kwargs = on_gpu.distribute_inputs((program.args, program.kwargs or {}))
        placed = TargetProgram(model, args, kwargs)

        def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
            return training.loss(model(*args, **kwargs))

        options: dict[str, Any] = {"plan": "global", "topology": this.cluster or this.gpu}
        compiled = torch.compile(loss, backend="dtensor", options=options)

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            with implicit_replication():
                return compiled(*args, **kwargs)

        return Training(placed, run, training.settings)

    return prepare


def forecasts_of(plan: PlacementPlan, this: PlacedTarget, others: Sequence[str]) -> list[Forecast]:
    """Forecasts of a plan, of the known plans that are possible, and of targets that distribute their models."""
    found = [this.forecast("this one", plan, plan.choice)]
    found += [this.forecast(known.name, plan, known.choice) for known in plan.known if known.choice is not None]
    return found + [this.own(target) for target in others]
