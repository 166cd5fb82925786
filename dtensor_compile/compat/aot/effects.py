"""Tokens that order effectful operators (``linalg.inv`` checks its result) in graphs that AOTAutograd makes for
Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._higher_order_ops.effects import _get_effect

from dtensor_compile.compat.aot.fx import is_fake
from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch

#: The modules that import the function.
_UNLIFT = tuple(
    patch(f"torch._functorch._aot_autograd.{module}:unlift_tokens", "fw_module fw_metadata ...")
    for module in ("graph_capture", "graph_compile")
)


@needs(
    "effectful operators inside of DTensor operators",
    *_UNLIFT,
    without="they are an error of the compilation",
    upstream="#184111 made the operators effectful; #190908, the same for while_loop",
    remove_when="AOTAutograd finds the token for an effectful operator inside of a tensor subclass",
)
@contextlib.contextmanager
def tokens_from_inputs() -> Iterator[None]:
    """While active, graphs that AOTAutograd makes on this thread start each chain of effects with their input token.

    Inside a DTensor operator the tracer does not see that token and uses a fake tensor as a constant instead. The token
    input is then unused, and AOTAutograd, which removes tokens for Inductor, refuses the graph.
    """

    def unlift(stock: Any, fw_module: torch.fx.GraphModule, fw_metadata: Any, *args: Any, **kwargs: Any) -> None:
        _begin_with_inputs(fw_module, list(fw_metadata.tokens))
        stock(fw_module, fw_metadata, *args, **kwargs)

    with patched(_UNLIFT[0], unlift), patched(_UNLIFT[1], unlift):
        yield


def _begin_with_inputs(module: torch.fx.GraphModule, effects: list[Any]) -> None:
    """Replaces constants that start a chain of effects by the token of the effect.

    Args:
        effects: in the order of their tokens, the first inputs of `module`.
    """
    tokens = dict(zip(effects, module.graph.find_nodes(op="placeholder")))
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        token, operator = node.args[:2]
        given = tokens.get(_get_effect(operator))
        if token.op == "get_attr" and is_fake(getattr(module, str(token.target))) and given is not None:
            node.replace_input_with(token, given)
