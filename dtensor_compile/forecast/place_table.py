"""Tables of a plan of placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dtensor_compile.compat.dtensor.step_record import BACKWARD
from dtensor_compile.forecast.placed_steps import Forecast
from dtensor_compile.forecast.plan_table import size_text
from dtensor_compile.global_plan.alternatives import RefusedPlacement
from dtensor_compile.global_plan.choose_placements import Choice
from dtensor_compile.global_plan.equal_calls import by_pattern, pattern
from dtensor_compile.global_plan.known_plans import Alternative
from dtensor_compile.global_plan.place import PlacementPlan
from dtensor_compile.global_plan.plan_rows import PlanRow, RowDifference
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.report.compare_reports import seconds_text

#: Rows of what holds the memory, and of differences between plans.
_HOLDERS, _DIFFERENCES = 6, 40


@dataclass(frozen=True)
class ShownValue:
    """A value that was asked about: its other placements, and those that no strategy has."""

    name: str
    others: Sequence[Alternative]
    refused: Sequence[RefusedPlacement]


@dataclass(frozen=True)
class ShownDifferences:
    """Another plan, and the rows in which this one differs from it."""

    other: str
    rows: Sequence[RowDifference]


@dataclass(frozen=True)
class Shown:
    """What is shown of a plan besides its placements: its rows, and what was asked for."""

    rows: Sequence[PlanRow]
    value: ShownValue | None = None
    differences: ShownDifferences | None = None
    forecasts: Sequence[Forecast] = ()


def print_plan(plan: PlacementPlan, shown: Shown, console: Console) -> None:
    """Prints placements, known plans beside this one, and what was asked for."""
    names = "".join(f" {name}={n}" for name, n in zip(plan.mesh.mesh_dim_names or (), plan.mesh.shape))
    table = Table(title=f"placements over{names}", title_justify="left")
    for column in ("parameter", "placements", "local tensor"):
        table.add_column(column)
    sizes = _local_sizes(plan)
    for name, placements in by_pattern(plan.parameters).items():
        table.add_row(name, spec_text(placements), sizes[name])
    for i, placements in enumerate(plan.inputs):
        table.add_row(f"input {i}", spec_text(placements), sizes[str(i)])
    console.print(table)
    choices = Table(title="plans", title_justify="left")
    choices.add_column("plan")
    for column in ("step", "compute", "exposed", "hidden", "sent", "memory"):
        choices.add_column(column, justify="right")
    _add_row(choices, "this one", plan.choice)
    for other in plan.known:
        _add_row(choices, other.name, other.choice)
    console.print(choices)
    if shown.forecasts:
        _print_forecasts(shown.forecasts, console)
    console.print(
        f"no plan of equal blocks placed equally is faster by more than {plan.choice.gap:.2%}, by this estimate; the "
        "memory is that of parameters, gradients, optimizer states and what the backward pass needs",
        highlight=False,
    )
    for op in sorted(plan.without_rule):
        console.print(_without_rule(op, shown.rows), highlight=False)
    _print_asked(plan, shown, console)
    if not plan.choice.fits and plan.budget is not None:
        _print_holders(shown.rows, console)
        console.print(
            f"no plan fits into {size_text(int(plan.budget))}: "
            f"the nearest, above, needs {size_text(int(plan.choice.memory))}",
            highlight=False,
        )


def _print_asked(plan: PlacementPlan, shown: Shown, console: Console) -> None:
    if shown.value is not None:
        _print_value(shown.value, plan, console)
    if shown.differences is not None:
        _print_differences(shown.differences, console)


def _print_forecasts(forecasts: Sequence[Forecast], console: Console) -> None:
    table = Table(title="forecasts of the compiled code, optimizer included", title_justify="left")
    table.add_column("plan", overflow="fold")
    for column in ("step", "compute", "exposed", "hidden", "idle", "sent", "memory"):
        table.add_column(column, justify="right")
    for this in forecasts:
        if this.plan is None:
            table.add_row(this.name, this.failed)
            continue
        time = this.plan.time
        parts = (time.step, time.compute, time.exposed, time.hidden, time.idle)
        sent = sum(row.bytes for row in this.plan.communication)
        table.add_row(this.name, *map(seconds_text, parts), size_text(sent), size_text(this.plan.memory.needed))
    console.print(table)


def _without_rule(op: str, rows: Sequence[PlanRow]) -> str:
    own = [row for row in rows if row.kind == "call" and op.replace("::", ".").startswith(row.name)]
    took, sent = sum(row.compute for row in own), sum(row.sent for row in own)
    return (
        f"{op} has no rule in DTensor: it runs on replicated tensors, with {seconds_text(took)} of compute and "
        f"{size_text(int(sent))} sent"
    )


def _print_holders(rows: Sequence[PlanRow], console: Console) -> None:
    table = Table(title="what holds the memory", title_justify="left")
    for column in ("holder", "module", "placements"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes", justify="right")
    most = sorted(rows, key=lambda row: -row.memory)
    for row in most[:_HOLDERS]:
        what = f"{row.name}, gradient and states" if row.kind == "parameter" else f"{row.name}, for the backward pass"
        table.add_row(what, row.module, row.placed, size_text(int(row.memory)))
    if most[_HOLDERS:]:
        rest = most[_HOLDERS:]
        table.add_row(f"{len(rest)} more", "", "", size_text(int(sum(row.memory for row in rest))))
    console.print(table)


def _print_differences(shown: ShownDifferences, console: Console) -> None:
    if not shown.rows:
        console.print(f"no row differs from {shown.other}", highlight=False)
        return
    table = Table(title=f"differences from {shown.other}", title_justify="left")
    for column in ("module", "operator", "there", "here"):
        table.add_column(column, overflow="fold")
    for column in ("slower by", "sent"):
        table.add_column(column, justify="right")
    most = sorted(shown.rows, key=lambda this: -abs(this.seconds))[:_DIFFERENCES]
    for this in (row for row in shown.rows if row in most):
        row = this.after or this.before
        assert row is not None
        sent = (this.after.sent if this.after else 0.0) - (this.before.sent if this.before else 0.0)
        named = row.name if row.kind == "call" else row.kind
        table.add_row(
            row.module,
            f"{named}{' (backward)' if row.phase == BACKWARD else ''}{f' x {row.count}' if row.count > 1 else ''}",
            _placed(this.before),
            _placed(this.after),
            f"{'-' if this.seconds < 0 else ''}{seconds_text(abs(this.seconds))}",
            f"{'-' if sent < 0 else ''}{size_text(int(abs(sent)))}",
        )
    console.print(table)
    if shown.rows[_DIFFERENCES:]:
        console.print(f"and {len(shown.rows) - _DIFFERENCES} more that matter less", highlight=False)


def _placed(row: PlanRow | None) -> str:
    if row is None:
        return "no such row"
    return "\n".join([row.placed, *(f"{move.what}: {move.before} to {move.after}" for move in row.moves)])


def _print_value(shown: ShownValue, plan: PlacementPlan, console: Console) -> None:
    table = Table(title=f"placements of {shown.name}", title_justify="left")
    table.add_column("placements")
    for column in ("slower by", "compute", "exposed", "hidden", "sent", "memory"):
        table.add_column(column, justify="right")
    for other in shown.others:
        slower = "chosen" if other.chosen else ""
        if other.choice is not None and not other.chosen:
            slower = f"{other.choice.seconds / plan.choice.seconds - 1:.2%}"
        _add_row(table, other.name, other.choice, slower)
    console.print(table)
    if not shown.refused:
        return
    table = Table(title="inputs that the rules of its operators do not take", title_justify="left")
    for column in ("operator", "mesh dim", "argument", "placement", "reason"):
        table.add_column(column, overflow="fold")
    for this in shown.refused:
        table.add_row(this.operator, this.mesh_dim, str(this.input), spec_text((this.placement,)), this.reason)
    console.print(table)


def _add_row(table: Table, name: str, choice: Choice | None, first: str | None = None) -> None:
    if choice is None:
        table.add_row(name, "not possible" if first is None else first or "not possible")
        return
    table.add_row(
        name,
        seconds_text(choice.seconds) if first is None else first,
        *(seconds_text(part) for part in (choice.compute, choice.exposed, choice.hidden)),
        size_text(int(choice.sent)),
        size_text(int(choice.memory)) + ("" if choice.fits else ", too much"),
    )


def _local_sizes(plan: PlacementPlan) -> dict[str, str]:
    """The sizes of the local tensor of each parameter's pattern and of each input."""
    found: dict[str, str] = {}
    numbered = {**plan.step.parameters, **{str(i): number for i, number in enumerate(plan.step.inputs)}}
    placed: Mapping[str, Any] = {**plan.parameters, **{str(i): p for i, p in enumerate(plan.inputs)}}
    patterns = by_pattern(placed)
    for name, number in numbered.items():
        shape = list(plan.step.tensors[number].shape)
        for placement, n in zip(placed[name], plan.mesh.shape):
            if placement.is_shard():
                shape[placement.dim] //= n
        found.setdefault(pattern(name) if pattern(name) in patterns else name, str(tuple(shape)))
    return found
