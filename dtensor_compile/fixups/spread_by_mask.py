"""Computes the gradient of ``x.max()`` as eager does on a CPU: zero if no element equals the extreme.

    before   q = g / mask.sum(); grad = mask * q
    after    q = g / mask.sum(); grad = where(mask, q, 0)

Results are the same for every mask with a true element. Eager fills by the mask on a CPU; the traced graph multiplies
by it, and 0 * inf is nan. No element equals the extreme if the latter was changed in place, for instance to the maximum
over ranks.

Upstream: not reported: needs a maximum that was changed in place, for instance to the largest of all ranks; eager's
    formula is https://github.com/pytorch/pytorch/pull/45280 (Fixed handling of nan for evenly_distribute_backward;
    closed).
Releases: 2.11 to 2.15.
Remove when: evenly_distribute_backward selects by the mask for subclasses and tensors that are traced, as on a CPU.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten


def spread_by_mask(graph: torch.fx.Graph) -> None:
    """Replaces products of a mask and a quotient by the number of its true elements in a joint graph by selections."""
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        mask, quotient = node.args
        if not _is_mask(mask) or node.meta["val"].device.type != "cpu" or not _divides_by_count(quotient, mask):
            continue
        node.target = aten.where.ScalarOther
        node.args = (mask, quotient, 0)


def _is_mask(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _divides_by_count(node: object, mask: torch.fx.Node) -> bool:
    if not isinstance(node, torch.fx.Node) or node.target is not aten.div.Tensor:
        return False
    count = node.args[1]
    return isinstance(count, torch.fx.Node) and count.target is aten.sum.default and count.args[0] is mask
