"""Tokens that order operators with effects (``linalg.inv`` checks its result), where AOTAutograd makes graphs for
Inductor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._functorch._aot_autograd import graph_capture, graph_compile
from torch._higher_order_ops.effects import _get_effect

from dtensor_compile.compat.aot.fx import is_fake
from dtensor_compile.compat.hooks import hook, needs


@needs(
    "operators with effects inside of DTensor operators",
    hook("torch._functorch._aot_autograd.graph_capture:unlift_tokens", "fw_module fw_metadata ..."),
    hook("torch._functorch._aot_autograd.graph_compile:unlift_tokens", "fw_module fw_metadata ..."),
    without="they are an error of the compilation",
)
@contextlib.contextmanager
def tokens_from_inputs() -> Iterator[None]:
    """While it is entered, graphs that AOTAutograd makes on this thread begin a chain of effects with the token they
    are given.

    Inside a DTensor operator the tracer does not see that token and leaves a fake tensor in its place, as a constant;
    the token stays an input without a use, and AOTAutograd, which takes tokens out again for Inductor, refuses the
    graph."""
    owner, stock = threading.get_ident(), graph_capture.unlift_tokens

    def unlift(fw_module: torch.fx.GraphModule, fw_metadata: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == owner:
            _begin_with_inputs(fw_module, list(fw_metadata.tokens))
        stock(fw_module, fw_metadata, *args, **kwargs)

    with (
        mock.patch.object(graph_capture, "unlift_tokens", unlift),
        mock.patch.object(graph_compile, "unlift_tokens", unlift),
    ):
        yield


def _begin_with_inputs(module: torch.fx.GraphModule, effects: list[Any]) -> None:
    """Puts the token of its effect, the first inputs of `module` in the order of `effects`, where a chain begins with a
    constant.
    """
    tokens = dict(zip(effects, module.graph.find_nodes(op="placeholder")))
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        token, operator = node.args[:2]
        given = tokens.get(_get_effect(operator))
        if token.op == "get_attr" and is_fake(getattr(module, str(token.target))) and given is not None:
            node.replace_input_with(token, given)
