"""`explain`: the report of one call of a function or a module, on the current process group.

report = dtensor_compile.explain(model)(x)
print(report.ours.totals.all.bytes)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dtensor_compile.capture.checks import tensor_meshes
from dtensor_compile.compat import pytree
from dtensor_compile.compat.aot.run_graph import compile_to_aten
from dtensor_compile.compat.dynamo import counters
from dtensor_compile.compat.dynamo.observe import name_modules, uncompiled
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.errors import DTensorCompileError
from dtensor_compile.recording.recorder import Recording, record
from dtensor_compile.report.build import build_report
from dtensor_compile.report.model import Report
from dtensor_compile.report.outside import outside_recorded
from dtensor_compile.report.target import one_line

#: The ways to compile for a report: without kernels (fast; the same graphs and collectives), or with Inductor's.
KERNELS = ("aten", "inductor")


def explain(
    function: Callable[..., Any],
    *,
    stock: bool = False,
    backward: bool = True,
    cluster: str | None = None,
    kernels: str = "aten",
) -> Callable[..., Report]:
    """Returns a function that takes the arguments of `function`, calls it compiled, and returns the report.

    A compilation that fails is part of the report (`Side.failed`, and a break with its cause); other errors are raised.

    Args:
        function: the function or module to report on; if it is compiled already, the original is used.
        stock: also compile it as stock torch does, and compare.
        backward: run the backward pass of the sum of its results, if any requires a gradient. Gradients accumulate as
            usual.
        cluster: the machine for which times are estimated; None: as in `dtensor_compile.report.machine.machine_of`.
        kernels: ``"aten"`` compiles without Inductor, which is fast and gives the same collectives; ``"inductor"`` as
            usual.
    """

    def call(*args: Any, **kwargs: Any) -> Report:
        def run(compiled: Callable[..., Any]) -> None:
            out = compiled(*args, **kwargs)
            if backward:
                run_backward(out)

        ours = recorded(uncompiled(function), run, kernels=kernels)
        theirs = recorded_stock(uncompiled(function), run) if stock else None
        name = getattr(function, "__qualname__", type(function).__name__)
        return build_report(ours, stock=theirs, target=name, cluster=cluster)

    return call


def recorded(
    model: Callable[..., Any],
    run: Callable[[Callable[..., Any]], None],
    *,
    kernels: str,
    options: Mapping[str, Any] = {},
    profile: bool = False,
) -> Recording:
    """The recording of ``run(compiled model)`` under this backend. Resets compiled functions of this process.

    Args:
        profile: also measure compile time by stage and layer, with empty caches.
    """
    counters.reset()
    with (
        _empty_caches() if profile else contextlib.nullcontext(),
        record(profile=profile) as recording,
        failures_recorded(recording),
    ):
        run(torch.compile(model, backend="dtensor", options={**options, "kernels": kernels}))
    return recording


@contextlib.contextmanager
def _empty_caches() -> Iterator[None]:
    """While active, caches are empty but for what is compiled once on a machine, and modules of torch are imported."""
    with fresh_caches():
        torch.compile(lambda x: (x + 1).sin())(torch.ones(64))
        counters.reset()
        yield


def recorded_stock(
    model: Callable[..., Any], run: Callable[[Callable[..., Any]], None], *, profile: bool = False
) -> Recording:
    """The same under stock torch, without kernels: Dynamo, AOTAutograd and the partitioner of Inductor, without our
    code. With `profile` it is stock Inductor, with kernels.
    """
    counters.reset()
    failures = functools.partial(failures_recorded, all_errors=True)
    if profile:
        with _empty_caches(), record(others=True, profile=True) as recording, failures(recording):
            run(torch.compile(model))
        return recording
    with record() as recording, failures(recording), outside_recorded(recording):

        def stock(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            name_modules(gm)
            tensor_meshes(gm)  # remembers them: a collective is reported by the mesh dim of its process group
            return compile_to_aten(gm, example_inputs, joint_pass=lambda graph: None, post_grad_pass=recording.observe)

        run(torch.compile(model, backend=stock))
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
