"""A plan of placements as a self-contained HTML page: the model as a tree of modules, with the placements of every
operator and the bytes that are sent before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dtensor_compile.compat.dtensor.step_record import BACKWARD
from dtensor_compile.forecast.plan_table import size_text
from dtensor_compile.global_plan.place import PlacementPlan
from dtensor_compile.global_plan.plan_rows import PlanRow
from dtensor_compile.report.compare_reports import seconds_text
from dtensor_compile.report.templates import template


@dataclass
class ModuleNode:
    """A module: its own rows, and the modules in it.

    Attributes:
        name: last part of its path.
        path: of all equal modules, with ``*``.
        rows: of its parameters and calls.
        parts: modules in it, by name.
    """

    name: str
    path: str
    rows: list[PlanRow] = field(default_factory=list)
    parts: dict[str, ModuleNode] = field(default_factory=dict)

    def every(self) -> list[PlanRow]:
        """Its rows, and those of the modules in it."""
        return [*self.rows, *(row for part in self.parts.values() for row in part.every())]

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in it."""
        return sum(row.sent for row in self.every())

    @property
    def seconds(self) -> float:
        """Seconds of its compute and of all its communication."""
        return sum(row.compute + row.exposed + row.hidden for row in self.every())

    @property
    def memory(self) -> float:
        """Bytes that a rank holds for it."""
        return sum(row.memory for row in self.every())


def module_tree(rows: Sequence[PlanRow]) -> ModuleNode:
    """The rows of a plan by module; those without a module are the model's own."""
    root = ModuleNode("model", "")
    for row in rows:
        node = root
        for part in row.module.split(".") if row.module else ():
            path = f"{node.path}.{part}" if node.path else part
            node = node.parts.setdefault(part, ModuleNode(part, path))
        node.rows.append(row)
    return root


def placement_page(target: str, plan: PlacementPlan, rows: Sequence[PlanRow]) -> str:
    """The page of a plan."""
    names = plan.mesh.mesh_dim_names or ()
    return template("dtensor_compile.forecast", "place.html.j2").render(
        target=target,
        mesh=", ".join(f"{name}={n}" for name, n in zip(names, plan.mesh.shape)),
        plans=[("this one", plan.choice), *((known.name, known.choice) for known in plan.known)],
        root=module_tree(rows),
        most=max((row.sent for row in rows), default=0.0) or 1.0,
        backward=BACKWARD,
        size=lambda bytes: size_text(int(bytes)),
        seconds=seconds_text,
    )
