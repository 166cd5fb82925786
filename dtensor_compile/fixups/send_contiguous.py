"""What is reduced over ranks is contiguous before it is sent, and so is what comes back.

    before   m = div(grad, n); s = all_reduce(m)                 m has the layout of the kernel that made it
    after    m = div(grad, n); c = contiguous(m); s = all_reduce(c)

Inductor computes convolutions, and their gradients, in channels-last, whatever the layout in which they were traced,
and the copy that the trace left out as needless is needed again: made before a reduction it is part of the kernel that
divides; made after it, each result is copied once more, and what is in flight holds two copies. Only what the wrappers
of data parallelism reduce (`REDISTRIBUTES`): what the program itself sends keeps its layout.
"""

from __future__ import annotations

import torch

from dtensor_compile.compat.aot.fx import as_fake_as
from dtensor_compile.compat.distributed.functional_collectives import functional
from dtensor_compile.graph.nodes import REDISTRIBUTES

_ALL_REDUCE = functional("all_reduce")


def send_contiguous(graph: torch.fx.Graph) -> None:
    """Puts the copies into a lowered graph for a compiler that fuses them, before each reduction whose input is not
    contiguous.
    """
    for node in graph.find_nodes(op="call_function", target=_ALL_REDUCE):
        value = node.args[0].meta.get("val")
        if REDISTRIBUTES not in node.meta or not isinstance(value, torch.Tensor) or value.is_contiguous():
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(
                torch.ops.aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format}
            )
        with as_fake_as(value):
            result = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        copy.meta.update(node.args[0].meta, val=result)
        node.update_arg(0, copy)
        for later in (node, *node.users):
            later.meta["val"] = result
