"""Decisions, with costs, about gradients whose placements differ from those that a graph was compiled for
(`compat.aot.tangents`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import DTensor, Placement

from dtensor_compile.compat.aot.tangents import ENOUGH, UnexpectedTangents
from dtensor_compile.compat.distributed.device_meshes import real_mesh
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import PlanError, SpecTextError
from dtensor_compile.ir.mesh import mesh_text, parse_mesh
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.ops.redistribute import plan_of
from dtensor_compile.planner.search import bytes_sent


def unexpected_placements(this: UnexpectedTangents, communication: Callable[[], float]) -> Decision:
    """The decision about gradients with other placements.

    Args:
        communication: returns the estimated seconds of the collectives of a step, all of which eager waits for.
    """
    came, expected = (", ".join(map(_text, these)) for these in (this.placed, this.expected))
    reason = f"a gradient has placements {came}, and the graph was compiled for {expected}: "
    if this.in_eager:
        again = f"; after {ENOUGH} of them the graph is compiled for such gradients" if this.learns else ""
        reason += f"this backward pass runs in eager, after another forward pass{again}"
        cost: dict[str, Any] = {"seconds": communication()}
    else:
        reason += "torch redistributes it when the backward pass runs, because the program cannot run again"
        cost = {"bytes": sum(map(_bytes_between, this.gradients, this.expected))}
    return Decision("gradient_placements", "", reason, expected, came, left_alone=True, **cost)


def _text(placements: Sequence[Placement]) -> str:
    try:
        return spec_text(placements)
    except SpecTextError:  # of a user-defined class
        return str(list(placements))


def _bytes_between(value: Any, expected: Sequence[Placement]) -> int:
    """Bytes that a rank sends to redistribute a gradient to these placements; 0 if there is no plan."""
    if not isinstance(value, DTensor):
        return 0
    mesh = real_mesh(value.device_mesh)
    try:
        steps = plan_of(
            spec_text(value.placements),
            spec_text(expected),
            parse_mesh(mesh_text(mesh)),
            value.shape,
            value.element_size(),
            bounded=False,
        )
    except (SpecTextError, PlanError):
        return 0
    return bytes_sent(steps, value.element_size())
