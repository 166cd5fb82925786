"""Makes dropout masks boolean on ranks without elements.

torch's ``native_dropout`` on a CPU returns a boolean mask, but for a tensor without elements a mask of the tensor's own
dtype (2.13, ``aten/src/ATen/native/Dropout.cpp``). If shards of some ranks are empty, a mask that is redistributed for
a gradient would be sent as one dtype and received as another, which reads uninitialized bytes or crashes the job.

Upstream: not reported: shows only where a mask of an empty shard is sent to another rank; the dtype of an empty mask is
    worth a report.
Releases: 2.11 to 2.15.
Remove when: native_dropout on a CPU returns a bool mask for tensors without elements.
"""

from __future__ import annotations

import operator

import torch

from dtensor_compile.graph.arguments import value_of
from dtensor_compile.graph.node_builder import inherited
from dtensor_compile.graph.nodes import call_before

aten = torch.ops.aten


def make_masks_boolean(graph: torch.fx.Graph) -> None:
    """Makes dropout masks of the joint graph boolean on every rank."""
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        for mask in [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]:
            if 0 not in [size for size in value_of(mask).shape if type(size) is int]:
                continue  # the fake value of the mask is boolean in either case
            made = call_before(aten.ne.Scalar, (mask, 0), like=mask, before=mask.next)
            made.meta |= inherited(mask)
            mask.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
