"""Numbers that only the data decides, as Dynamo sees them while it traces for our backend.

``item()``, ``tolist()`` and operators whose result has a size of its own (``bincount``, ``nonzero``) end a graph in torch, unless a
switch is on. Here they are part of the graph: numbers without a value while it is traced. Nothing can depend on what they are, so
that ranks whose data differ have the same graph.

Where a program cannot do without the value (a loop over such a number, an operator that needs a size), tracing or the backend
raises. Eager would not, so the frame is traced once more as torch does it, with a graph break where the number is read.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch._dynamo import config, convert_frame
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch.utils._sympy.symbol import SymT, symbol_is_type

from dtensor_compile.compat.dynamo import compiles_for_us

_SWITCHES = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


def _met_numbers(error: Exception) -> bool:
    """Whether the attempt to trace a frame that ended with `error` had met numbers that only the data decides."""
    output = getattr(getattr(error, "_torch_dynamo_tracer_output", None), "output_graph_for_cleanup", None)
    return output is not None and any(
        symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)) for symbol in output.shape_env.var_to_range
    )


@contextlib.contextmanager
def numbers_in_the_graph() -> Iterator[None]:
    """While it is entered, frames that are compiled for our backend keep numbers that only the data decides in their graph."""
    stock, signature = convert_frame.trace_frame, inspect.signature(convert_frame.trace_frame)
    failed: list[Any] = []  # the logs, one per frame, of frames that need these numbers to be known

    def trace_frame(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        log = given["speculation_log"]
        if not compiles_for_us(given["compiler_fn"]) or any(log is other for other in failed):
            return stock(*args, **kwargs)
        try:
            with config.patch(_SWITCHES):
                return stock(*args, **kwargs)
        except (RestartAnalysis, SkipFrame):
            raise
        except Exception as error:
            if given["one_graph"] or not _met_numbers(error):
                raise
            failed.append(log)
            log.clear()
            raise RestartAnalysis(restart_reason="a number that only the data decides has to be known") from error

    convert_frame.trace_frame = trace_frame
    try:
        yield
    finally:
        convert_frame.trace_frame = stock
