"""Frames that are left to Python: code that Dynamo must not compile, under our backend or under any.

The registry is consulted when Dynamo is about to compile a frame (`tracing`), so other backends are not affected. Two
of the functions mark the code itself instead, and say why.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch._dynamo.eval_frame import FrameAction, FrameExecStrategy, set_code_exec_strategy, skip_code

from dtensor_compile.compat.apply_patches import STANDS_FOR

#: Code whose frames our backend leaves to Python.
_left: set[types.CodeType] = set()
_left_if: list[Callable[[types.CodeType], bool]] = []


def is_left(code: types.CodeType) -> bool:
    """Whether frames of `code` are left to Python under our backend."""
    return code in _left or any(leave(code) for leave in _left_if)


@functools.cache
def leave_to_python(cls: type) -> None:
    """Leaves frames of methods of `cls` that Python enters to Python under our backend; calls from traced code are
    still traced.

    Dynamo does so itself for objects that it cannot inspect: it cannot trace one that is only partly constructed or
    copied.
    """
    for member in vars(cls).values():
        function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if isinstance(function, types.FunctionType):
            _left.add(getattr(function, STANDS_FOR, function).__code__)


def leave_code_to_python(leave: Callable[[types.CodeType], bool]) -> None:
    """Leaves frames to Python whose code satisfies `leave`, under our backend; calls from traced code are still
    traced."""
    _left_if.append(leave)


def leave_calls_to_python(function: types.FunctionType) -> None:
    """Leaves frames of `function` that Python enters to Python from now on, and so everything that they call.

    The code is marked for good: Dynamo decides about a frame without tensors before it calls `_compile`, and would then
    compile the functions that the frame calls.
    """
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def leave_frames_to_python(function: Callable[..., Any]) -> None:
    """Leaves frames of `function`, one of ours, to Python under any backend; functions that it calls may be
    compiled."""
    assert isinstance(function, types.FunctionType)
    skip_code(function.__code__)
