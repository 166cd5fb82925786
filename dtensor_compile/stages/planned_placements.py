"""Placements for the whole program (`global_plan`), chosen before AOTAutograd traces it and applied while it does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
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
from dtensor_compile.errors import one_line
from dtensor_compile.global_plan.choose_placements import Choice, choose_placements, choose_restricted
from dtensor_compile.global_plan.connect_calls import connected_variables, taken_from
from dtensor_compile.global_plan.step_variables import CostSettings, StepVariables
from dtensor_compile.graph.node_costs import module_path
from dtensor_compile.stages.compilation import Compilation
from dtensor_compile.topology.devices import default_cluster
from dtensor_compile.topology.network import plans_for

T = TypeVar("T")

#: Kind of the decisions.
GLOBAL_PLAN = "global_plan"


def until_placed(compile: Callable[[], T], this: Compilation) -> T:
    """The result of `compile`; it is called again without planned placements if the calls are not those recorded."""
    before = this.log.mark()
    try:
        return compile()
    except PlacementsLost as error:
        this.log.forget_since(before)
        this.placed = False
        _leave_alone(one_line(error), this)
        return compile()


@contextlib.contextmanager
def planned_placements(this: Compilation) -> Iterator[None]:
    """While active, the program is traced with placements that are chosen for all of it, if it can be."""
    with contextlib.ExitStack() as stack:

        def plan(program: torch.fx.GraphModule) -> None:
            if planned := _planned(program, this):
                stack.enter_context(calls_planned(program, planned))

        with programs_changed(plan):
            yield


def _planned(program: torch.fx.GraphModule, this: Compilation) -> list[PlannedCalls]:
    """The calls of a program over each mesh with their planned placements; not those over meshes on which they are
    DTensor's own, with a decision."""

    def recorded() -> list[tuple[DeviceMesh, RecordedStep]]:
        if this.shares_blocks:
            raise ProgramError('equal blocks are compiled once (blocks="once")')
        meshes = tensor_meshes(program)
        steps = record_program(program, this.inputs, meshes, module_path)
        called = [(mesh, step) for mesh, step in zip(meshes, steps) if step.calls]
        if not called:
            raise ProgramError("it calls no operators on DTensors")
        return called

    called = _if_possible(recorded, "", this) or []
    planned = []
    for mesh, step in called:
        over = f" over {_name(mesh)}" if len(called) > 1 else ""
        planned.append(_if_possible(functools.partial(_chosen, step, mesh, over, this), over, this))
    return [calls for calls in planned if calls is not None]


def _if_possible(make: Callable[[], T], over: str, this: Compilation) -> T | None:
    """What `make` returns; None with a decision if it raises."""
    try:
        return make()
    except ProgramError as error:
        _leave_alone(one_line(error), this, over)
    except Exception as error:  # noqa: BLE001 - whatever a rule or a fake tensor raises
        if restarts_analysis(error) or this.options.strict:
            raise
        _leave_alone(f"{type(error).__name__}: {one_line(error)}", this, over)
    return None


def _name(mesh: DeviceMesh) -> str:
    """A mesh as a reader of the report knows it: its dims with their sizes."""
    names = mesh.mesh_dim_names or [f"dim_{i}" for i in range(mesh.ndim)]
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape))


def _leave_alone(why: str, this: Compilation, over: str = "") -> None:
    this.log.decided([Decision(GLOBAL_PLAN, "", f"placements{over} are DTensor's own: {why}", left_alone=True)])


def _chosen(step: RecordedStep, mesh: DeviceMesh, over: str, this: Compilation) -> PlannedCalls:
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise ProgramError("the mesh dims have no names")
    cluster = this.options.topology or default_cluster(mesh.device_type)
    fixed = {str(i): step.placements[number] for i, number in enumerate(step.inputs)}
    with plans_for(cluster):  # seconds of compute and of communication have to be those of one cluster
        variables = connected_variables(step, mesh, CostSettings(cluster.device, 0.0, fixed))
    choice = choose_placements(variables.model, overlaps=this.options.schedule)
    greedy = _greedy(step, variables)
    calls = range(len(step.calls))
    if not choice.possible or greedy.seconds <= choice.seconds:
        why = "no other placements are possible" if not choice.possible else "no others are faster, by estimate"
        this.log.decided([Decision(GLOBAL_PLAN, "", f"placements{over} are DTensor's own: {why}")])
        this.log.decided(_corrected(step))
        unshared: list[tuple[None, ...]] = [(None,) * len(call.inputs) for call in step.calls]
        return PlannedCalls(mesh, step, [step.taken[call] for call in calls], unshared)
    own = f"{greedy.seconds * 1e3:.3f} ms and {greedy.sent:,.0f} bytes"
    reason = (
        f"placements for {len(step.calls)} calls{over} together: {choice.seconds * 1e3:.3f} ms and "
        f"{choice.sent:,.0f} bytes a step by estimate, instead of {own if greedy.possible else 'ones that have no estimate'}; at most "
        f"{choice.gap:.1%} above the best"
    )
    this.log.decided([Decision(GLOBAL_PLAN, "", reason)])
    this.log.decided(_corrected(step))
    strategies = [variables.strategy(choice.choice, call) for call in calls]
    return PlannedCalls(mesh, step, strategies, [taken_from(variables, choice.choice, call) for call in calls])


def _corrected(step: RecordedStep) -> list[Decision]:
    """What the program computes otherwise than in eager, where DTensor's numbers depend on the placements."""
    names = ", ".join(sorted(name.removeprefix("aten::") for name in step.in_parts))
    reason = (
        f"{names}: the gradient of the mean over the whole tensor; where it is sharded, DTensor's own divides by the "
        "elements of a shard, and is larger by the number of shards"
    )
    return [Decision(GLOBAL_PLAN, "", reason)] if names else []


def _greedy(step: RecordedStep, variables: StepVariables) -> Choice:
    """DTensor's own choice for the first call of each class, by the same costs."""
    kept: dict[int, Sequence[int]] = {}
    for call, variable in enumerate(variables.of_call):
        if variable not in kept:
            kept[variable] = [list(variables.strategies[variable]).index(step.taken[call])]
    return choose_restricted(variables.model, kept)
