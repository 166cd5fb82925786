"""Typed access to arguments and fake values of nodes.

``node.args[i]`` may be a node, a number, a text, a list or nothing, as far as a type checker knows; a pass that has
matched the operator knows which. These functions assert the type; their errors name the node, the argument and the
value found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.fx.node import map_arg

T = TypeVar("T")


def node_arg(node: torch.fx.Node, place: int) -> torch.fx.Node:
    """The argument of `node` at `place`, which is a node.

    Raises:
        TypeError: it is not a node, or there is none.
    """
    return const_arg(node, place, torch.fx.Node)


def const_arg(node: torch.fx.Node, place: int, kind: type[T]) -> T:
    """The argument of `node` at `place`, which is a `kind`.

    Args:
        node: whose argument it is.
        place: its position; negative ones count from the end.
        kind: its type: ``int``, ``str``, ``list``.

    Returns:
        The argument.

    Raises:
        TypeError: it is something else, or there is none.
    """
    found = node.args[place] if -len(node.args) <= place < len(node.args) else None
    if not isinstance(found, kind):
        raise TypeError(
            f"argument {place} of {node.name} = {node.target}{node.args} is a {type(found).__name__}, "
            f"not a {kind.__name__}"
        )
    return found


def texts_in(nodes: Iterable[torch.fx.Node]) -> set[str]:
    """All arguments of nodes that are text, such as names of process groups."""
    return {arg for node in nodes for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, str)}


def list_arg(node: torch.fx.Node, place: int) -> list[Any]:
    """The argument of `node` at `place`, a list or a tuple of numbers or nodes, as a list.

    Raises:
        TypeError: it is something else, or there is none.
    """
    found = node.args[place] if -len(node.args) <= place < len(node.args) else None
    return list(found) if isinstance(found, tuple) else list(const_arg(node, place, list))


def function_of(node: torch.fx.Node) -> Callable[..., Any]:
    """The function that `node` calls.

    Raises:
        TypeError: it calls a method or a module, by name, or nothing.
    """
    if isinstance(node.target, str):
        raise TypeError(f"{node.name} is a {node.op} of {node.target!r}, and calls no function")
    return node.target


def operator_of(node: torch.fx.Node) -> torch._ops.OpOverload:
    """The operator that `node` calls.

    Raises:
        TypeError: it calls something else: a Python function, a module.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        raise TypeError(f"{node.name} calls {node.target}, which is no operator of torch's")
    return node.target


def value_of(node: torch.fx.Node) -> torch.Tensor:
    """The fake tensor that `node` returns.

    Raises:
        TypeError: it returns something else, or it was not traced.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{node.name} = {node.target}{node.args} gives a {type(value).__name__}, not a tensor")
    return value


def values_of(node: torch.fx.Node) -> tuple[Any, ...]:
    """The fake values that `node` returns: one, or those of a list."""
    value = node.meta["val"]
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def sizes_of(shape: Iterable[Any]) -> list[Any]:
    """Sizes as numbers and symbols; for a size that is a node, its fake value."""
    return [size.meta["val"] if isinstance(size, torch.fx.Node) else size for size in shape]


def fake_arguments(node: torch.fx.Node) -> tuple[Any, Any]:
    """Positional and named arguments of `node`, with fake values in place of nodes; None for nodes that have none."""
    return map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))


def fake_result(node: torch.fx.Node) -> Any:
    """The result of `node` on the fake values of its arguments.

    Raises:
        KeyError: an argument has none.
        Exception: any exception that the operator raises on them.
    """
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return function_of(node)(*args, **kwargs)
