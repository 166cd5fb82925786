"""Names in the program for modules that Dynamo reaches by another path.

Dynamo names a module by its source: ``L['args'][0]`` in a wrapper that passes on ``*args``, ``L['fn'].args[0]`` in a
``functools.partial``, ``L['this']`` in a method whose first parameter has that name. In the program these are
``model``, as in the wrapped function, and ``self``. A module without a known name is named by its class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, CodeType
from typing import Any

import torch


def module_name(node: torch.fx.Node) -> str:
    """Dynamo's name of the innermost module whose forward a node belongs to; for a node of the backward that of its
    forward operator. Empty if there is none.
    """
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return str(list(modules.values())[-1][0]) if modules else ""


def root_names(
    code: CodeType, function: str, local_values: Mapping[str, Any], closure: Sequence[CellType] | None
) -> dict[str, str]:
    """Maps Dynamo's names of roots to those of the program, where they differ; longer ones, of parts of others, first.

    Args:
        code: the code object that is compiled.
        function: name of the function; after a graph break, that of `code` differs.
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
    if code.co_argcount == 0:  # a wrapper that passes on its arguments
        inside = [value for value in free.values() if callable(value)]
        given = local_values.get(args, ()), local_values.get(kwargs, {})
        names.update(_names(f"L['{args}']", given[0], f"L['{kwargs}']", given[1], inside))
    return dict(sorted(names.items(), key=lambda pair: -len(pair[0])))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - the read may raise
    except ValueError:
        return False
    return True


def _is_self(name: str, value: Any, code: CodeType, function: str) -> bool:
    """Whether `name` is the first parameter of a method of `value` that `code` is, or resumes."""
    method = getattr(inspect.unwrap(getattr(type(value), function, None) or value), "__code__", None)
    return method is not None and method.co_filename == code.co_filename and method.co_varnames[:1] == (name,)


def _names(
    of_args: str,
    args: Sequence[Any],
    of_kwargs: str,
    kwargs: Mapping[str, Any],
    functions: Sequence[Callable[..., Any]],
) -> Iterator[tuple[str, str]]:
    """Names of arguments that one of `functions` is called with; class names of modules if the function is
    ambiguous."""
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
    """The parameter names of `function` for `args`; nothing if it does not accept them or has no signature."""
    try:
        signature = inspect.signature(function)
        signature.bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return
    plain = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(plain) >= len(args):
        yield tuple(plain[: len(args)])
