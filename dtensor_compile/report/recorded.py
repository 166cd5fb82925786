"""Recordings of one call of a program: under this backend, under stock torch, and as a whole if it compiles parts one
by one.

A model may compile its parts one by one (``block.compile()``). Between them it runs in eager: gathers and reductions of
``fully_shard`` for instance, which nothing plans or hides. One graph serves all parts that are equal, and counts as
often as it runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor_compile.capture.checks import tensor_meshes
from dtensor_compile.compat import pytree
from dtensor_compile.compat.aot.run_graph import compile_to_aten
from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.dynamo.observers.compiled_parts import compiled_parts, parts_compiled
from dtensor_compile.compat.dynamo.observers.observe import current_compilation, name_modules
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.errors import DTensorCompileError, one_line
from dtensor_compile.recording.profile import Profile
from dtensor_compile.recording.recorder import Recording, record
from dtensor_compile.report.outside import outside_recorded

#: Calls a model once, as it was compiled.
Run = Callable[[Callable[..., Any]], None]


@dataclass(frozen=True)
class Recordings:
    """One program under several backends.

    Attributes:
        ours: under this backend, as the program is written.
        stock: the same under stock torch; None if that was not asked for.
        whole: under this backend, compiled as a whole; None if `ours` is that.
        parts: the names of the parts that the program compiles one by one.
    """

    ours: Recording
    stock: Recording | None = None
    whole: Recording | None = None
    parts: tuple[str, ...] = ()


def recorded_all(
    make: Callable[[], tuple[Callable[..., Any], Run]], *, stock: bool, kernels: str, profile: bool = False
) -> Recordings:
    """The recordings of a program.

    Args:
        make: makes the model, and the function that calls it once; again for each recording.
        stock: whether stock is asked for.
        kernels, profile: as in `recorded`.
    """
    model, run = make()
    parts = tuple(compiled_parts(model))
    ours = recorded(model, run, kernels=kernels, profile=profile)
    theirs = recorded_stock(*make()) if stock or parts else None
    if theirs is not None and profile and kernels == "inductor":
        theirs.profile = _profile_of_stock(*make())
    if theirs is None or not parts:
        return Recordings(ours, theirs)
    if not theirs.failed:
        ours.outside = theirs.outside  # the same code runs between the parts
    whole = recorded(*make(), kernels=kernels, profile=profile, by_part=False)
    return Recordings(ours, theirs if stock else None, whole, parts)


@contextlib.contextmanager
def _compiled(model: Callable[..., Any], by_part: bool = True, **how: Any) -> Iterator[Callable[..., Any]]:
    """The model compiled, in its own parts or as a whole."""
    by_part = by_part and bool(compiled_parts(model))
    with parts_compiled(model, how if by_part else None):
        yield model if by_part else torch.compile(model, **how)


def recorded(
    model: Callable[..., Any],
    run: Run,
    *,
    kernels: str,
    options: Mapping[str, Any] = {},
    profile: bool = False,
    by_part: bool = True,
) -> Recording:
    """The recording of ``run(compiled model)`` under this backend. Resets compiled functions of this process.

    Args:
        profile: also measure compile time by stage and layer, with empty caches.
        by_part: whether parts of the model that are compiled one by one stay so.
    """
    counters.reset()
    with (
        _empty_caches() if profile else contextlib.nullcontext(),
        record(profile=profile) as recording,
        failures_recorded(recording),
    ):
        recording.one_step = True
        with _compiled(model, by_part, backend="dtensor", options={**options, "kernels": kernels}) as compiled:
            run(compiled)
    return recording


@contextlib.contextmanager
def _empty_caches() -> Iterator[None]:
    """While active, caches are empty except for code compiled once on a machine, and modules of torch are imported."""
    with fresh_caches():
        torch.compile(lambda x: (x + 1).sin())(torch.ones(64))
        counters.reset()
        yield


def _profile_of_stock(model: Callable[..., Any], run: Run) -> Profile | None:
    """The compile time of stock Inductor, with empty caches."""
    counters.reset()
    with (
        _empty_caches(),
        record(profile=True) as recording,
        failures_recorded(recording, all_errors=True),
        _compiled(model) as compiled,
    ):
        run(compiled)
    return recording.profile


def recorded_stock(model: Callable[..., Any], run: Run) -> Recording:
    """The same under stock torch, without kernels: Dynamo, AOTAutograd and the partitioner of Inductor, without our
    code.
    """
    counters.reset()
    failures = functools.partial(failures_recorded, all_errors=True)
    with record() as recording, failures(recording), outside_recorded(recording):

        def stock(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            name_modules(gm)
            tensor_meshes(gm)  # remembers them: a collective is reported by the mesh dim of its process group
            this = current_compilation()

            def observe(graph: torch.fx.Graph) -> None:
                recording.observe(graph)
                recording.graphs[-1].compilation = this  # a backward pass is compiled when it first runs

            made = compile_to_aten(gm, example_inputs, joint_pass=lambda graph: None, post_grad_pass=observe)
            return this.counted(made) if this is not None else made

        recording.one_step = True
        with _compiled(model, backend=stock) as compiled:
            run(compiled)
    return recording


@contextlib.contextmanager
def failures_recorded(recording: Recording, *, all_errors: bool = False) -> Iterator[None]:
    """Records an error that ends a compilation, whose cause is in `recording`, and ends the block without raising.

    Args:
        all_errors: record every error: the same program ran before, so that it is not the program's.
    """
    try:
        yield
    except Exception as error:
        if not all_errors and not any(event.error for event in recording.breaks):
            raise
        raised = error.__cause__ if isinstance(error, DTensorCompileError) and error.__cause__ else error
        recording.failed = f"{type(raised).__name__}: {one_line(raised)}"


def run_backward(out: Any) -> None:
    """Runs the backward pass of the sum of all tensors in `out` that require gradients."""
    leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    if leaves:
        torch.autograd.backward([x.sum() for x in leaves])
