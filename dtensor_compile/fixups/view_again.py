"""Fake values of views say whose memory they are views of, whatever was put in the place of what they were made from.

    before   y = redistribute(x); v = view(y)            v is a view of y
    between  g = all_gather(x); y' = wait(g); v = view(y')     the fake value of v is still a view of that of y
    after    v is a view of y'

Inductor drops a copy where fake values say that copy and original are not both outputs: two outputs would be one.
"""

from __future__ import annotations

import operator

import torch
from torch.fx.node import map_arg

from dtensor_compile.compat.dtensor.specs import storage_of
from dtensor_compile.graph.extra_copies import VIEWS


def view_again(graph: torch.fx.Graph) -> None:
    """Makes the fake values of views in `graph` again that are none of their first argument's."""
    for node in graph.nodes:
        if node.target not in VIEWS or not isinstance(source := node.args[0], torch.fx.Node):
            continue
        was, now = source.meta.get("val"), node.meta.get("val")
        if node.target is operator.getitem:
            if isinstance(was, (list, tuple)):
                node.meta["val"] = was[node.args[1]]
        elif _memory(was) != _memory(now):
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)


def _memory(value: object) -> int | None:
    """What names the memory of a tensor, or of the first of several views."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return storage_of(first) if isinstance(first, torch.Tensor) else None
