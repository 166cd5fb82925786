"""New nodes: a call, metadata inherited from the replaced node, and a fake value.

`dtensor_compile.graph.nodes.call_before` is the one for passes over redistribute nodes, which also determines in which
of the two graphs a node runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dtensor_compile.graph.arguments import fake_result

#: Keys of a node's ``meta`` that describe its own value.
_OF_ITS_VALUE = ("val", "tensor_meta")

#: Placeholder for the value that an operator returns on the fake values of its arguments.
_COMPUTED = object()


def inherited(node: torch.fx.Node, but: Iterable[str] = ()) -> dict[str, Any]:
    """The ``meta`` of `node` without descriptions of its value, and without the keys `but`."""
    left_out = {*_OF_ITS_VALUE, *but}
    return {key: value for key, value in node.meta.items() if key not in left_out}


def add_call(
    graph: torch.fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    meta: Mapping[str, Any],
    value: Any = _COMPUTED,
) -> torch.fx.Node:
    """Adds a new node at the insertion point of `graph`.

    Args:
        target: the operator or function that it calls.
        args, kwargs: its arguments, nodes and numbers.
        meta: its metadata besides its value (`inherited`).
        value: its fake value; by default the result of `target` on those of its arguments.

    Returns:
        The node.
    """
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta = dict(meta)
    node.meta["val"] = fake_result(node) if value is _COMPUTED else value
    return node
