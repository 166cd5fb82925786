"""Makes the first tokens of operators with effects (``linalg.inv`` checks its result) real tensors.

AOTAutograd orders such operators by passing a token from one to the next. Inside a DTensor operator it finds them too
late to make the first token an input of the graph, and leaves a fake tensor in the graph as a constant, with which it
cannot run.

    before   with_effects(_tensor_constant0: FakeTensor, aten._linalg_check_errors, info, "linalg.inv", is_matrix=False)
    after    with_effects(_tensor_constant0: Tensor, aten._linalg_check_errors, info, "linalg.inv", is_matrix=False)

Upstream: https://github.com/pytorch/pytorch/issues/129486 (Compiling tensor subclasses fails when using custom op with
    effect tokens; closed, another symptom of the same combination); the effect itself is
    https://github.com/pytorch/pytorch/pull/184111 (Preserve linalg error checks in AOT graphs; closed).
Releases: 2.11 to 2.15.
Remove when: AOTAutograd gives tokens of effects inside of tensor subclasses real tensors or its token input.
"""

from __future__ import annotations

import torch

from dtensor_compile.compat.aot.fx import first_token, is_fake


def make_tokens_real(graph: torch.fx.Graph) -> None:
    """Replaces fake tensors that the graph holds as first tokens by empty ones."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        token = node.args[0]
        if token.op == "get_attr" and is_fake(getattr(graph.owning_module, str(token.target))):
            setattr(graph.owning_module, str(token.target), first_token())
