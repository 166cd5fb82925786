"""Runs a graph operator by operator where an input has the negative bit.

    x = z.conj().imag        # the memory of z's imaginary part, and a bit that says that its sign is the other one
    compiled(x)              # Inductor's kernels read the memory, and compute with -x

Operators of ATen, which such a graph runs then, look at the bit. Views made inside of the program are right.

Upstream: https://github.com/pytorch/pytorch/issues/145093 (Inductor aten.clone lowering ignores Conjugate and Negative
    dispatch keys).
Releases: 2.11 to 2.15.
Remove when: kernels of Inductor's read an input that has the negative bit with its sign.
"""

from __future__ import annotations

import torch

from dtensor_compile.compat.pytree import tensor_and_inner
from dtensor_compile.decisions import Decision


def negative_inputs(gm: torch.fx.GraphModule) -> list[Decision]:
    """A decision for a Dynamo graph that has to run operator by operator for its inputs; none for others."""
    inputs = gm.graph.find_nodes(op="placeholder")
    names = [node.name for node in inputs if any(x.is_neg() for x in tensor_and_inner(node.meta.get("example_value")))]
    if not names:
        return []
    reason = f"Inductor ignores the negative bit of {', '.join(names)}: operators run one by one"
    return [Decision("run_negative_inputs", "", reason, before="inductor", after="aten", left_alone=True)]
