"""Updates fake values of views after their bases were replaced.

    before   y = redistribute(x); v = view(y)            v is a view of y
    between  g = all_gather(x); y' = wait(g); v = view(y')     the fake value of v is still a view of that of y
    after    v is a view of y'

Inductor uses fake values to keep copies if both copy and original are outputs: two outputs would alias.

Upstream: not reported: a consequence of passes that put nodes in the place of others, which torch's own passes fix by
    FakeTensorUpdater.
Releases: 2.11 to 2.15.
Remove when: this package's lowering updates fake values with torch's FakeTensorUpdater, or Inductor does before it
    drops copies.
"""

from __future__ import annotations

import operator

import torch

from dtensor_compile.compat.dtensor.specs import storage_of
from dtensor_compile.graph.arguments import const_arg, fake_result
from dtensor_compile.graph.operator_traits import VIEWS


def view_again(graph: torch.fx.Graph) -> None:
    """Recomputes fake values of views in `graph` that do not alias the fake value of their first argument."""
    for node in graph.nodes:
        if node.target not in VIEWS or not isinstance(source := node.args[0], torch.fx.Node):
            continue
        was, now = source.meta.get("val"), node.meta.get("val")
        if node.target is operator.getitem:
            if isinstance(was, (list, tuple)):
                node.meta["val"] = was[const_arg(node, 1, int)]
        elif _memory(was) != _memory(now):
            node.meta["val"] = fake_result(node)


def _memory(value: object) -> int | None:
    """Identity of the memory of a tensor, or of the first of several views."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return storage_of(first) if isinstance(first, torch.Tensor) else None
