"""The scope in which messages of convolutions over sharded images become nodes with waits
(`compat.dtensor.convolution`).

Symptom: The messages of a convolution over an image that is sharded in width are traced as calls without waits, so that
    the columns at the shard edges are wrong.
Upstream: not reported: needs a compiled convolution whose image is sharded in width; point-to-point in Dynamo is
    https://github.com/pytorch/pytorch/pull/161213 ([dynamo ] Enabling batch_isend_irecv to compile; closed).
Releases: 2.11 to 2.14.
Remove when: _tp_conv exchanges edges by functional operators that are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from dtensor_compile.compat.distributed.functional_collectives import wait_tensor
from dtensor_compile.compat.dtensor.convolution import messages_of_convolutions
from dtensor_compile.ops.c10d import exchange


def _exchange(
    tensors: list[torch.Tensor], receives: list[bool], peers: list[int], group: dist.ProcessGroup
) -> Sequence[torch.Tensor]:
    n = len(tensors)
    results = exchange(tensors, [int(receive) for receive in receives], peers, [0] * n, [group.group_name] * n)
    return [wait_tensor(result) for result in results]


def edges_of_convolutions() -> AbstractContextManager[None]:
    """While active, compiled convolutions over sharded images exchange the columns at the edges as eager does."""
    return messages_of_convolutions(_exchange)
