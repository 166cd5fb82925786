"""The target of a report: a function that returns a model and its inputs, a step, or a script with its arguments.

    package.module:function     script.py:function     script.py ARGUMENTS

A function takes no arguments, or a ``mesh``. It returns ``model, inputs``, or a step to call, or it is the step.
`inputs` is a tensor, a tuple of arguments or a dict of them. Every failure is a `TargetError` with a message of one
line that gives advice.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor_compile.errors import DTensorCompileError, one_line
from dtensor_compile.report.sources import is_users


class TargetError(DTensorCompileError):
    """A target cannot be analyzed; the message gives the reason and advice, in one line."""


@dataclass(frozen=True)
class TargetProgram:
    """A model and one call of it.

    Attributes:
        model: the model to compile.
        args, kwargs: of the call.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    def call(self, compiled: Callable[..., Any]) -> Any:
        """Calls `compiled` in place of the model; returns its result."""
        return compiled(*self.args, **(self.kwargs or {}))


def is_script(target: str) -> bool:
    """Whether a target is a script to run, and not a function in one."""
    return ":" not in os.path.basename(target)


def function_of(target: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``script.py:function`` names.

    Raises:
        TargetError: there is none, or its module does not import.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TargetError(f"{target!r} is not a target: give package.module:function, script.py:function, or script.py")
    module = _import(place, target)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, [n for n in dir(value) if not n.startswith("_")], n=3)
            raise TargetError(
                f"{place} has no {part!r}" + (f": did you mean {' or '.join(map(repr, near))}?" if near else "")
            )
        value = getattr(value, part)
    if not callable(value):
        kind = type(value).__name__
        raise TargetError(
            f"{target} is of type {kind}, not a function: write a function that returns a model and its inputs"
        )
    return value


def _import(place: str, target: str) -> Any:
    if place.endswith(".py"):
        path = existing_script(place)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent.resolve()))
        sys.modules[path.stem] = module
        with _users_errors(f"{place} does not import"):
            spec.loader.exec_module(module)
        return module
    if not re.fullmatch(r"\w+(\.\w+)*", place):
        raise TargetError(f"{target!r} is not a target: give package.module:function, script.py:function, or script.py")
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(place)
    except ImportError:
        found = None
    if found is None:
        raise TargetError(
            f"there is no module {place!r}: run this where it imports, or give the file, script.py:function"
        )
    with _users_errors(f"{place} does not import"):
        return importlib.import_module(place)


def existing_script(text: str) -> pathlib.Path:
    """The file with that name.

    Raises:
        TargetError: there is none.
    """
    path = pathlib.Path(text)
    if not path.is_file():
        raise TargetError(f"there is no file {text!r}: give the path of a Python script, or package.module:function")
    return path


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a script as ``python script arguments`` does, in this process.

    Raises:
        TargetError: it does not exist, raises, or exits with a status other than 0.
    """
    path = existing_script(script)
    argv, sys.argv = sys.argv, [script, *arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with _users_errors(f"{script} raises"):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            what = f"says {end.code!r}" if isinstance(end.code, str) else f"ends with status {end.code}"
            raise TargetError(f"{script} {what}: does it need arguments? They go after it: {script} ARGUMENTS") from end
    finally:
        sys.argv = argv
        sys.path.remove(str(path.parent.resolve()))


def call_target(
    function: Callable[..., Any], target: str, mesh: Callable[[], Any], arguments: Mapping[str, Any] = {}
) -> Any:
    """Calls the function of a target, with a mesh if it takes one.

    Args:
        mesh: creates the mesh.
        arguments: other arguments of the function, by name.

    Raises:
        TargetError: it needs other arguments, does not take these, or raises.
    """
    parameters = inspect.signature(function).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    foreign = [name for name in arguments if name not in parameters and not any_name]
    if foreign:
        raise TargetError(f"{target} takes no argument {foreign[0]!r}: it takes {', '.join(parameters) or 'none'}")
    needed = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in arguments
    ]
    if [name for name in needed if name != "mesh"]:
        raise TargetError(
            f"{target} needs arguments ({', '.join(needed)}): write a function that takes none, or only mesh, and "
            "returns the model and its inputs"
        )
    with users_program(target):
        return function(**({"mesh": mesh()} if "mesh" in parameters else {}), **arguments)


def program_of(result: Any) -> TargetProgram | None:
    """The model and the call that a target returned; None if it returned neither those nor a step."""
    if isinstance(result, (tuple, list)) and len(result) == 2 and callable(result[0]):
        model, inputs = result
        if isinstance(inputs, dict):
            return TargetProgram(model, (), inputs)
        return TargetProgram(model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))
    return TargetProgram(result) if callable(result) and not isinstance(result, torch.Tensor) else None


@contextlib.contextmanager
def users_program(target: str) -> Iterator[None]:
    """Context that turns an error of the user's program into a `TargetError` of one line."""
    with _users_errors(f"{target} raises"):
        yield


@contextlib.contextmanager
def _users_errors(what: str) -> Iterator[None]:
    try:
        yield
    except TargetError:
        raise
    except Exception as error:
        advice = _needs_gpu(error)
        where = _users_frame(error)
        if advice:
            raise TargetError(
                f"{what}: it needs a device that is not available ({one_line(error)}{where}); {advice}"
            ) from error
        raise TargetError(
            f"{what}: {type(error).__name__}: {one_line(error)}{where}; --verbose shows the traceback"
        ) from error


#: torch's messages about a missing device.
_GPU = re.compile(
    r"no NVIDIA driver|not compiled with (CUDA|XPU|ROCm)|No (CUDA|XPU|HIP) GPUs are available|CUDA driver"
    r"|device type (cuda|xpu|hpu)\b|Cannot access accelerator|Expected one of cpu|torch\.(cuda|xpu) is not available"
    r"|Invalid device.*(cuda|xpu)|which is not available",
    re.I,
)


def _needs_gpu(error: Exception) -> str:
    missing = _GPU.search(str(error)) and not torch.cuda.is_available()
    return (
        'make model and mesh on "cpu" where torch.cuda.is_available() is false: a report needs no GPU'
        if missing
        else ""
    )


def _users_frame(error: Exception) -> str:
    """`` (at file:line)`` of the innermost frame of the user's program."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" (at {error.filename}:{error.lineno})"
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename) and os.path.isfile(f.filename)]
    stdlib = os.path.dirname(os.__file__)
    own = [f for f in own if not f.filename.startswith(stdlib) or "site-packages" in f.filename]
    return f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""
