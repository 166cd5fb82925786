"""Frames that stay with Python: code that Dynamo is not to compile, under our backend or under any.

What is said here is asked where Dynamo is about to compile a frame (`tracing`), so that other backends compile it as
ever. Two of the functions note it on the code itself instead, and say why.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch._dynamo.eval_frame import FrameAction, FrameExecStrategy, set_code_exec_strategy, skip_code

from dtensor_compile.compat.apply_patches import STANDS_FOR

#: Code whose frames a backend of ours leaves to Python.
_left: set[types.CodeType] = set()
_left_if: list[Callable[[types.CodeType], bool]] = []


def is_left(code: types.CodeType) -> bool:
    """Whether frames of `code` stay with Python under our backend."""
    return code in _left or any(leave(code) for leave in _left_if)


@functools.cache
def leave_to_python(cls: type) -> None:
    """Frames of methods of `cls` that Python enters stay with Python under our backend; calls from what is traced are
    traced as ever.

    Dynamo does so itself for objects that it cannot look into: it cannot trace one that is half made, or half copied.
    """
    for member in vars(cls).values():
        function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if isinstance(function, types.FunctionType):
            _left.add(getattr(function, STANDS_FOR, function).__code__)


def leave_code_to_python(leave: Callable[[types.CodeType], bool]) -> None:
    """Frames whose code `leave` says so of stay with Python under our backend; calls from what is traced are traced."""
    _left_if.append(leave)


def leave_calls_to_python(function: types.FunctionType) -> None:
    """Frames of `function` that Python enters stay with Python from now on, and so does what they call.

    This is noted on the code, for good: Dynamo decides about a frame without tensors before it asks `_compile`, and
    then compiles what the frame calls.
    """
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def leave_frames_to_python(function: Callable[..., Any]) -> None:
    """Frames of `function`, one of ours, stay with Python under any backend; what it calls may be compiled."""
    assert isinstance(function, types.FunctionType)
    skip_code(function.__code__)
