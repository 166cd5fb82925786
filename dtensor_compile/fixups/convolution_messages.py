"""The scope in which messages of convolutions over sharded images are nodes that are waited for
(`compat.dtensor.convolution`).
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
    """While it is entered, compiled convolutions over sharded images exchange the columns at the edges as eager
    does.
    """
    return messages_of_convolutions(_exchange)
