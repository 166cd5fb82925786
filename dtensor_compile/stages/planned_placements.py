"""Placements for the whole program (`global_plan`), chosen before AOTAutograd traces it and applied while it does.

They are chosen by estimates of operators and redistributions one by one. Where these do not clearly say that the plan
is faster than DTensor's own placements, the program is lowered with both, and the forecasts of the graphs decide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.capture.checks import tensor_meshes
from dtensor_compile.compat.aot.block_graphs import programs_changed
from dtensor_compile.compat.dtensor.planned_calls import PlacementsLost, PlannedCalls, calls_planned
from dtensor_compile.compat.dtensor.program_calls import ProgramError, record_program
from dtensor_compile.compat.dtensor.step_record import RecordedStep
from dtensor_compile.compat.dynamo.tracing import restarts_analysis
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import DTensorCompileError, one_line
from dtensor_compile.global_plan.choose_placements import choose_placements
from dtensor_compile.global_plan.connect_calls import connected_variables, taken_from
from dtensor_compile.global_plan.step_variables import CostSettings
from dtensor_compile.graph.node_costs import module_path
from dtensor_compile.stages.compilation import Compilation
from dtensor_compile.topology.devices import default_cluster
from dtensor_compile.topology.network import plans_for

T = TypeVar("T")

_Forecast = Callable[[Sequence[PlannedCalls]], "float | None"]

#: Kind of the decisions.
GLOBAL_PLAN = "global_plan"

#: How many times as fast a plan is by estimate if it is taken without a forecast. Estimates do not know the collectives
#: that are merged, nor what runs outside of the calls: of 14 programs, forecasts put plan and DTensor's own up to 1.8
#: times nearer to each other.
_CLEARLY = 2.0


@dataclass
class _Placed:
    """The calls over one mesh: with planned placements and with DTensor's own, the seconds of both by estimate, why the
    plan is taken, and what either computes otherwise than in eager."""

    planned: PlannedCalls
    own: PlannedCalls
    seconds: float
    own_seconds: float
    reason: str
    corrected: list[Decision]

    @property
    def clear(self) -> bool:
        return self.planned is self.own or self.own_seconds >= _CLEARLY * self.seconds


@dataclass
class _Program:
    """The calls over all meshes, and decisions about meshes that keep DTensor's placements because they have to."""

    placed: list[_Placed] = field(default_factory=list)
    left: list[Decision] = field(default_factory=list)

    def decisions(self, why_own: str = "", forecast: str = "") -> list[Decision]:
        """Those of the program, with its planned placements or, for a reason, with DTensor's own.

        Args:
            forecast: what forecasts say of the planned ones.
        """
        reasons = [why_own] if why_own else [mesh.reason + forecast for mesh in self.placed]
        corrected = [decision for mesh in self.placed for decision in mesh.corrected]
        return [*self.left, *(Decision(GLOBAL_PLAN, "", reason) for reason in reasons), *corrected]


class _Undecided(DTensorCompileError):
    """Forecasts have to decide between planned placements and DTensor's own."""

    def __init__(self, program: _Program) -> None:
        super().__init__("planned placements are not clearly faster by estimate")
        self.program = program


def until_placed(compile: Callable[[], T], forecast: _Forecast, this: Compilation) -> T:
    """The result of `compile`, which is called again with what a forecast decides, and without planned placements if
    the calls are not those recorded.

    Args:
        forecast: the seconds of a step with these calls; None if ranks do not have the same.
    """
    before = this.log.mark()
    while True:
        try:
            return compile()
        except _Undecided as found:
            decisions = _by_forecast(found.program, forecast, this)
        except PlacementsLost as error:
            this.placed = False
            decisions = [_left_alone(one_line(error))]
        this.log.forget_since(before)
        this.log.decided(decisions)


def _by_forecast(program: _Program, forecast: _Forecast, this: Compilation) -> list[Decision]:
    """Decides for the faster calls by forecast, or for the planned ones if ranks might decide otherwise; returns the
    decisions to report."""
    planned, own = [mesh.planned for mesh in program.placed], [mesh.own for mesh in program.placed]
    seconds = forecast(planned)
    own_seconds = None if seconds is None else forecast(own)
    if seconds is None or own_seconds is None:
        this.calls = planned
        return program.decisions(forecast="; not forecast, since ranks would have different forecasts")
    if seconds <= own_seconds:
        this.calls = planned
        figures = f"{seconds * 1e3:.3f} ms instead of {own_seconds * 1e3:.3f} ms"
        return program.decisions(forecast=f"; by forecast of the lowered graphs {figures}")
    this.calls = own
    return program.decisions(
        f"placements are DTensor's own: {own_seconds * 1e3:.3f} ms a step by forecast of the lowered graphs, where "
        f"those that are faster by estimate take {seconds * 1e3:.3f} ms"
    )


@contextlib.contextmanager
def planned_placements(this: Compilation) -> Iterator[None]:
    """While active, the program is traced with placements that are chosen for all of it, if it can be."""
    with contextlib.ExitStack() as stack:

        def plan(program: torch.fx.GraphModule) -> None:
            calls = this.calls
            if calls is None:
                found = _placed(program, this)
                if not all(mesh.clear for mesh in found.placed) and this.even:
                    raise _Undecided(found)
                this.log.decided(found.decisions())
                calls = [mesh.planned for mesh in found.placed]
            if calls:
                stack.enter_context(calls_planned(program, calls))

        with programs_changed(plan):
            yield


def _placed(program: torch.fx.GraphModule, this: Compilation) -> _Program:
    """The calls of a program over each mesh, placed if they can be."""
    found = _Program()

    def recorded() -> list[tuple[DeviceMesh, RecordedStep]]:
        if this.shares_blocks:
            raise ProgramError('equal blocks are compiled once (blocks="once", or nested_compile_region)')
        meshes = tensor_meshes(program)
        steps = record_program(program, this.inputs, meshes, module_path)
        called = [(mesh, step) for mesh, step in zip(meshes, steps) if step.calls]
        if not called:
            raise ProgramError("it calls no operators on DTensors")
        return called

    called = _if_possible(recorded, "", found.left, this) or []
    for mesh, step in called:
        over = f" over {_name(mesh)}" if len(called) > 1 else ""
        placed = _if_possible(functools.partial(_chosen, step, mesh, over, this), over, found.left, this)
        found.placed.extend([placed] if placed is not None else [])
    return found


def _if_possible(make: Callable[[], T], over: str, left: list[Decision], this: Compilation) -> T | None:
    """What `make` returns; None, with a decision in `left`, if it raises."""
    try:
        return make()
    except ProgramError as error:
        left.append(_left_alone(one_line(error), over))
    except Exception as error:  # noqa: BLE001 - whatever a rule or a fake tensor raises
        if restarts_analysis(error) or this.options.strict:
            raise
        left.append(_left_alone(f"{type(error).__name__}: {one_line(error)}", over))
    return None


def _name(mesh: DeviceMesh) -> str:
    """A mesh as a reader of the report knows it: its dims with their sizes."""
    names = mesh.mesh_dim_names or [f"dim_{i}" for i in range(mesh.ndim)]
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape))


def _left_alone(why: str, over: str = "") -> Decision:
    return Decision(GLOBAL_PLAN, "", f"placements{over} are DTensor's own: {why}", left_alone=True)


def _chosen(step: RecordedStep, mesh: DeviceMesh, over: str, this: Compilation) -> _Placed:
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise ProgramError("the mesh dims have no names")
    cluster = this.options.topology or default_cluster(mesh.device_type)
    fixed = {str(i): step.placements[number] for i, number in enumerate(step.inputs)}
    settings = CostSettings(cluster.device, 0.0, fixed)
    with plans_for(cluster):  # seconds of compute and of communication have to be those of one cluster
        variables = connected_variables(step, mesh, settings)
        own_variables = connected_variables(dataclasses.replace(step, kept=step.taken), mesh, settings)
    choice = choose_placements(variables.model, overlaps=this.options.schedule)
    greedy = choose_placements(own_variables.model, overlaps=this.options.schedule)
    calls = range(len(step.calls))
    unshared: list[tuple[None, ...]] = [(None,) * len(call.inputs) for call in step.calls]
    as_taken = PlannedCalls(mesh, step, [step.taken[call] for call in calls], unshared)
    if not choice.possible or greedy.seconds <= choice.seconds:
        why = "no other placements are possible" if not choice.possible else "no others are faster, by estimate"
        reason = f"placements{over} are DTensor's own: {why}"
        return _Placed(as_taken, as_taken, greedy.seconds, greedy.seconds, reason, _corrected(step))
    own = f"{greedy.seconds * 1e3:.3f} ms and {greedy.sent:,.0f} bytes" if greedy.possible else "ones without estimate"
    reason = (
        f"placements for {len(step.calls)} calls{over} together: {choice.seconds * 1e3:.3f} ms and "
        f"{choice.sent:,.0f} bytes a step by estimate, instead of {own}; at most "
        f"{choice.gap:.1%} above the best"
    )
    strategies = [variables.strategy(choice.choice, call) for call in calls]
    planned = PlannedCalls(mesh, step, strategies, [taken_from(variables, choice.choice, call) for call in calls])
    return _Placed(planned, as_taken, choice.seconds, greedy.seconds, reason, _corrected(step))


def _corrected(step: RecordedStep) -> list[Decision]:
    """What the program computes otherwise than in eager, where DTensor's numbers depend on the placements."""
    names = ", ".join(sorted(name.removeprefix("aten::") for name in step.in_parts))
    reason = (
        f"{names}: the gradient of the mean over the whole tensor; where it is sharded, DTensor's own divides by the "
        "elements of a shard, and is larger by the number of shards"
    )
    return [Decision(GLOBAL_PLAN, "", reason)] if names else []
