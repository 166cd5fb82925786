"""Programs whose backward pass raises: the forward compiles, and the error comes when the backward runs, as in eager.

AOTAutograd traces forward and backward at once, so that an operator without a gradient formula, or without a sharding
rule for its gradient, would refuse a program that only runs forward. The error becomes a node through which every
gradient passes:

    before   autograd raises "aten.cat.default got mixed torch.Tensor and DTensor" while it is traced
    after    return y, raise_error(x, tangent, "RuntimeError: aten.cat.default got mixed torch.Tensor and DTensor")

The node takes a tangent, so that it is part of the backward graph; errors of this package still end the compilation.

Upstream: https://github.com/pytorch/pytorch/issues/104943 ([torch.compile] RuntimeError during Gradient Computation in
    torch.compile(); closed as the consequence of tracing the backward ahead of time);
    https://github.com/pytorch/functorch/issues/848 (AOTAutograd makes unsafe assumptions on how the backward pass will
    look like).
Releases: 2.11 to 2.15.
Remove when: AOTAutograd traces the backward lazily, or puts an error of the joint trace off until the backward runs.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.aot.aot_backward import traced_backward_hook
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import DTensorCompileError

_library = torch.library.Library("dtensor_compile", "FRAGMENT")
_library.define("raise_error(Tensor like, Tensor tangent, str error) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

raise_error_op = torch.ops.dtensor_compile.raise_error.default


def error_text(error: BaseException) -> str:
    """``RuntimeError("x")`` -> ``"RuntimeError: x"``: class and message, so that graphs with it go through caches."""
    return f"{type(error).__name__}: {error}"


def raise_text(text: str) -> NoReturn:
    """Raises the error that `error_text` wrote; a ``RuntimeError`` if its class is not built in."""
    name, _, message = text.partition(": ")
    cls = getattr(builtins, name, None)
    raise (cls if isinstance(cls, type) and issubclass(cls, Exception) else RuntimeError)(message)


def _raise(like: torch.Tensor, tangent: torch.Tensor, error: str) -> torch.Tensor:
    raise_text(error)


def _fake(like: torch.Tensor, tangent: torch.Tensor, error: str) -> torch.Tensor:
    return torch.empty_like(like)


_library.impl("raise_error", _raise, "CompositeExplicitAutograd")
_library._register_fake("raise_error", _fake)


@contextlib.contextmanager
def defer_backward_errors(decided: Callable[[list[Decision]], None]) -> Iterator[None]:
    """While active, a backward that raises when this thread traces it becomes one that raises when it runs.

    Args:
        decided: receives a decision about each such backward pass.
    """

    def stand_in(
        error: Exception, inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor] | None:
        if isinstance(error, DTensorCompileError):
            return None
        text = error_text(error)
        decided(
            [
                Decision(
                    "defer_backward_error",
                    "",
                    "the backward pass raises; it is not traced, and raises when it runs",
                    text,
                )
            ]
        )
        with torch.no_grad():
            return [_failing(value, tangents[0], text) for value in inputs]

    with traced_backward_hook(stand_in):
        yield


def _like(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the sizes of `value`, which the graph does not read: the program may have written to it, so that it
    could not be saved for the backward."""
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _failing(value: torch.Tensor, tangent: torch.Tensor, text: str) -> torch.Tensor:
    """A gradient for `value` that raises when it is computed."""
    if isinstance(tangent, DTensor):
        tangent = tangent.to_local()
    if not isinstance(value, DTensor):
        return raise_error_op(_like(value), tangent, text)
    local = raise_error_op(_like(value.to_local()), tangent, text)
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
