"""A step on a graph, tested on the graph of a function."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dtensor_compile.testing import graph_text


def text_after(step: Callable[[torch.fx.Graph], Any], function: Callable[..., Any], x: torch.Tensor) -> str:
    """Text of the graph of ``function(x)`` after the step; the values stay to the bit."""
    gm = make_fx(function, tracing_mode="fake")(x)
    wanted = gm(x.clone())
    step(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(x.clone()), wanted, rtol=0, atol=0)
    return graph_text(gm.graph)
