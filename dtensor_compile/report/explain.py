"""`explain`: the report of one call of a function or a module, on the current process group.

report = dtensor_compile.explain(model)(x)
print(report.ours.totals.all.bytes)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtensor_compile.compat.dynamo.observers.observe import uncompiled
from dtensor_compile.report.build import report_of
from dtensor_compile.report.model import Report
from dtensor_compile.report.recorded import recorded_all, run_backward

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
        stock: also compile it as stock torch does, and compare. A model whose parts are compiled one by one is compared
            with the whole in any case.
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

        name = getattr(function, "__qualname__", type(function).__name__)
        found = recorded_all(lambda: (uncompiled(function), run), stock=stock, kernels=kernels)
        return report_of(found, target=name, cluster=cluster)

    return call
