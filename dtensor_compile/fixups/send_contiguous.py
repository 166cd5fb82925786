"""Makes inputs of reductions over ranks contiguous before they are sent, and so their results.

    before   m = div(grad, n); s = all_reduce(m)                 m has the layout of the kernel that made it
    after    m = div(grad, n); c = contiguous(m); s = all_reduce(c)

Inductor computes convolutions, and their gradients, in channels-last, whatever the layout in which they were traced,
and the copy that tracing dropped as a no-op is needed again: before a reduction it is fused into the kernel that
divides; after it, each result is copied once more, and a collective in flight holds two copies. Only reductions of data
parallelism's wrappers change (`REDISTRIBUTES`): collectives of the program itself keep their layout.

Upstream: not reported: a cost of Inductor's layout optimization, which shows only where gradients are reduced inside of
    the graph.
Releases: 2.11 to 2.14.
Remove when: Inductor takes the layout that a collective wants into account in its layout optimization.
"""

from __future__ import annotations

import torch

from dtensor_compile.compat.aot.fx import as_fake_as
from dtensor_compile.compat.distributed.functional_collectives import functional
from dtensor_compile.graph.arguments import node_arg
from dtensor_compile.graph.node_builder import add_call, inherited
from dtensor_compile.ops.groups import REDISTRIBUTES

_ALL_REDUCE = functional("all_reduce")


def send_contiguous(graph: torch.fx.Graph) -> None:
    """Inserts copies, which Inductor fuses, before each reduction of a lowered graph whose input is not contiguous."""
    for node in graph.find_nodes(op="call_function", target=_ALL_REDUCE):
        sent = node_arg(node, 0)
        value = sent.meta.get("val")
        if REDISTRIBUTES not in node.meta or not isinstance(value, torch.Tensor) or value.is_contiguous():
            continue
        with as_fake_as(value):
            result = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        contiguous = {"memory_format": torch.contiguous_format}
        with graph.inserting_before(node):
            copy = add_call(
                graph, torch.ops.aten.clone.default, (sent,), contiguous, meta=inherited(sent), value=result
            )
        node.update_arg(0, copy)
        for later in (node, *node.users):
            later.meta["val"] = result
