"""``@parity(mesh=(2, 2))``: a function that returns a model and its inputs becomes a test on ranks, which runs
`check_case`.

    @parity(mesh=(2, 2))
    def test_block(mesh):
        return build(mesh), [torch.randn(4, 64)]

Under pytest it is a test like any other and can be parametrized; called directly, it starts the ranks and raises if
compiled differs from eager. The error names the first value that differs and, by bisection, the part of the compilation
that causes it.
"""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor_compile.report.target import program_of
from dtensor_compile.testing.bisect import Culprit, bisect
from dtensor_compile.testing.local import compare_locally
from dtensor_compile.testing.parity import (
    Allowed,
    Case,
    Comparison,
    Difference,
    Loss,
    Settings,
    compare_case,
    of_all_ranks,
    sum_of_squares,
)
from dtensor_compile.testing.ranks import make_mesh, on_ranks


def parity(  # noqa: PLR0913 - options that are documented, by keyword only
    mesh: Sequence[int],
    *,
    names: Sequence[str] | None = None,
    loss: Loss | None = sum_of_squares,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    calls: int = 2,
    computed_in: torch.dtype | None = None,
    tolerance: float | None = None,
    backend: str = "dtensor",
    fullgraph: bool = True,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    bisected: bool = True,
    timeout: float = 240.0,
    local: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorator for a function that returns ``model, inputs`` (a tensor, a sequence of arguments, or a dict of them).

    Args:
        mesh: shape of the mesh that is passed to the function if it has a parameter ``mesh``; as many gloo ranks are
            started as it has devices.
        names: of the dims of the mesh.
        loss: from the outputs to the number whose gradients are compared, as in `Case`; None for no backward.
        optimizer: as in `Case`.
        calls: as in `Case`.
        computed_in: as in `Allowed`.
        tolerance: as in `Allowed`.
        backend: for ``torch.compile``.
        fullgraph: for ``torch.compile``.
        dynamic: for ``torch.compile``.
        options: for ``torch.compile``.
        bisected: find the part of the compilation that causes a difference; free if there is none.
        timeout: seconds after which the ranks are killed.
        local: start no ranks: all of them are in this process, and eager runs on torch's ``LocalTensor``
            (`testing.local`).

    Raises:
    Raises:
        RankError: in the test: compiled differs from eager, or a rank raised, died or did not answer in time.
        AssertionError: the same with `local`.
    """
    settings = Settings(backend, fullgraph, dynamic, options)
    world = math.prod(mesh)

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def compare(*args: Any, **kwargs: Any) -> None:
            made = functools.partial(make_program, functools.partial(_on_mesh(function, mesh, names), *args, **kwargs))
            allowed = Allowed(computed_in, tolerance)
            case = Case(made, loss=loss, optimizer=optimizer, calls=calls, allowed=allowed)
            check_case(case, settings, bisected=bisected, world=world if local else None)

        run: Any = compare if local else on_ranks(world, timeout)(compare)
        run.__signature__ = _without_mesh(function)
        return run

    return decorate


def _on_mesh(function: Callable[..., Any], mesh: Sequence[int], names: Sequence[str] | None) -> Callable[..., Any]:
    """Passes a mesh of that shape to the function if it takes one."""
    takes_mesh = "mesh" in inspect.signature(function).parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {"mesh": make_mesh(tuple(mesh), names and tuple(names))} if takes_mesh else {}
        return function(*args, **kwargs, **given)

    return call


def _without_mesh(function: Callable[..., Any]) -> inspect.Signature:
    """Signature for pytest, without a fixture ``mesh``."""
    signature = inspect.signature(function)
    return signature.replace(parameters=[p for name, p in signature.parameters.items() if name != "mesh"])


def make_program(function: Callable[[], Any]) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """Converts the result of a user's function for `Case`.

    Raises:
        TypeError: the result is not a program.
    """
    program = program_of(function())
    if program is None:
        raise TypeError("the function returns neither a model and its inputs nor a step to call")
    return program.model, program.args, program.kwargs or {}


def check_case(case: Case, settings: Settings, *, bisected: bool = True, world: int | None = None) -> None:
    """Raises an AssertionError with the differences of all ranks, and their cause; call it on every rank.

    Args:
        world: number of ranks in this process, which has no process group (`testing.local`).
    """
    comparison = compare_everywhere(case, settings, world)
    if comparison.differences:
        raise AssertionError(describe(comparison.differences, bisect_case(case, settings, world) if bisected else None))
    if not comparison.tensors:
        raise AssertionError("the program returns no tensor and modifies none: there is nothing to compare")


def compare_everywhere(case: Case, settings: Settings, world: int | None = None) -> Comparison:
    """The differences of all ranks: of those of this job, or of `world` ranks in this process."""
    return compare_case(case, settings, everywhere=True) if world is None else compare_locally(case, world, settings)


def bisect_case(case: Case, settings: Settings, world: int | None = None) -> Culprit:
    """`bisect` for a case; call it on every rank, or with the number of ranks in this process."""

    def differs(tried: Settings) -> bool:
        try:
            if world is not None:
                return bool(compare_locally(case, world, tried).differences)
            found = compare_case(case, tried).differences
        except Exception:  # noqa: BLE001 - settings under which it does not compile are not equal to eager
            found = [Difference("compiling", "", traceback.format_exc())]
        return bool(found if world is not None else of_all_ranks(found))

    return bisect(differs, settings)


def describe(differences: Sequence[Difference], culprit: Culprit | None = None, limit: int = 20) -> str:
    """Text of differences, the first one first, and their cause."""
    ranks = sorted({d.rank for d in differences})
    on = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    lines = [f"compiled differs from eager in {len(differences)} places, on {on}:"]
    lines += [f"  {d}" for d in differences[:limit]]
    if len(differences) > limit:
        lines.append(f"  and {len(differences) - limit} more")
    return "\n".join([*lines, *([str(culprit)] if culprit else [])])
