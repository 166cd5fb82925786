"""Results whose autograd graph was freed by a ``backward()`` inside the region: ``loss.backward(); return loss``.

Eager returns such a loss with a graph whose saved tensors are gone: it requires a gradient, and a second ``backward()``
raises. A compiled graph has no equivalent, so the value leaves the graph detached (`compat.dynamo.backward` marks its
node), and gets here, outside of it, an autograd graph of one node that raises eager's error. (Eager allows a second
backward through a graph that saved no tensors, a plain sum; this one raises.)

Upstream: https://github.com/pytorch/pytorch/issues/138217 ([PT2] Don't graph break on loss.backward());
    https://github.com/pytorch/pytorch/pull/169415 (Support tensor.backward in dynamo; closed, breaks the graph for such
    results).
Releases: 2.11 to 2.14.
Remove when: Dynamo itself returns such a result with a graph that raises in a second backward().
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from dtensor_compile.compat.dynamo.backward import USED_UP
from dtensor_compile.graph.arguments import list_arg

FREED = (
    "Trying to backward through the graph a second time: a backward() inside the compiled region used this value's "
    "graph up, and its saved tensors have been freed. Specify retain_graph=True in that backward() if this value is to "
    "be differentiated again."
)


class _FreedGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise RuntimeError(FREED)


def restore_freed_graphs(gm: torch.fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, the code of `gm`, with results that require a gradient again if `gm` marks their graph as freed."""
    results = list_arg(gm.graph.output_node(), 0)
    freed = [i for i, node in enumerate(results) if isinstance(node, torch.fx.Node) and USED_UP in node.meta]
    if not freed:
        return compiled
    anchor = torch.zeros((), requires_grad=True)  # a function of nothing that requires a gradient would have no graph

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        values = list(compiled(*args))
        with torch.enable_grad():
            for i in freed:
                values[i] = _FreedGraph.apply(values[i], anchor)
        return values

    return run
