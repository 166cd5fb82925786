"""What the program calls the modules that reach a compiled function by a way of Dynamo's own.

Dynamo names a module by where it finds it: ``L['args'][0]`` where a wrapper passes on ``*args``, ``L['fn'].args[0]``
in a ``functools.partial``, ``L['this']`` in a method whose first parameter is called so. The program calls these
``model``, as the wrapped function does, and ``self``. A module for which nothing gives a name is called by its class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, CodeType
from typing import Any

import torch


def root_names(
    code: CodeType, function: str, local_values: Mapping[str, Any], closure: Sequence[CellType] | None
) -> dict[str, str]:
    """Dynamo's words for a place -> the name of what is there, where the program has another one.

    Args:
        code: what is compiled.
        function: name of the function; that of `code` is another one for the rest behind a graph break.
        local_values: arguments by name.
        closure: values of the free variables of `code`.
    """
    free = {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure or ()) if _is_filled(cell)}
    names: dict[str, str] = {}
    for name, value in local_values.items():
        if name != "self" and _is_self(name, value, code, function):
            names[f"L['{name}']"] = "self"
    for name, value in {**free, **local_values}.items():
        if isinstance(value, functools.partial):
            names.update(_names(f"L['{name}'].args", value.args, f"L['{name}'].keywords", value.keywords, [value.func]))
    packed = list(code.co_varnames[code.co_argcount + code.co_kwonlyargcount :])  # *args and **kwargs come first
    args = packed.pop(0) if code.co_flags & inspect.CO_VARARGS else ""
    kwargs = packed.pop(0) if code.co_flags & inspect.CO_VARKEYWORDS else ""
    if code.co_argcount == 0:  # a wrapper that takes what it passes on
        inside = [value for value in free.values() if callable(value)]
        given = local_values.get(args, ()), local_values.get(kwargs, {})
        names.update(_names(f"L['{args}']", given[0], f"L['{kwargs}']", given[1], inside))
    return names


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - the read is the question
    except ValueError:
        return False
    return True


def _is_self(name: str, value: Any, code: CodeType, function: str) -> bool:
    """Whether `name` is the first parameter of the method of `value` that `code` is, or is the rest of."""
    method = getattr(inspect.unwrap(getattr(type(value), function, None) or value), "__code__", None)
    return method is not None and method.co_filename == code.co_filename and method.co_varnames[:1] == (name,)


def _names(
    of_args: str,
    args: Sequence[Any],
    of_kwargs: str,
    kwargs: Mapping[str, Any],
    functions: Sequence[Callable[..., Any]],
) -> Iterator[tuple[str, str]]:
    """Names of arguments that one of `functions` is called with; by classes of modules where it is not clear which."""
    found = {parameters for function in functions for parameters in _parameters(function, args, kwargs)}
    parameters = found.pop() if len(found) == 1 else ()
    for i, value in enumerate(args):
        if i < len(parameters):
            yield f"{of_args}[{i}]", parameters[i]
        elif isinstance(value, torch.nn.Module):
            yield f"{of_args}[{i}]", type(value).__name__
    for name in kwargs:
        yield f"{of_kwargs}['{name}']", name


def _parameters(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    """The names that `function` has for `args`; nothing where it does not take them, or has none."""
    try:
        signature = inspect.signature(function)
        signature.bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return
    plain = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(plain) >= len(args):
        yield tuple(plain[: len(args)])
