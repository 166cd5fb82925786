"""Groups of collectives that a wrapper of the program sends together, noted on their nodes.

``fully_shard`` gathers and reduces the parameters of one call together, ``DistributedDataParallel`` fills buckets with
gradients. While such a collective is traced, its node gets the name of its group; `dtensor_compile.schedule.bucket`
merges collectives with the same name. Names are text and integers, the same on every rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dtensor_compile.compat.dynamo.observers.observe import node_of

#: Key of a node's ``meta``: it is part of a redistribution or of a wrapper, which all ranks of its group run in the
#: same way (collectives of the program itself need not be: stages of a pipeline run different programs).
REDISTRIBUTES = "dtensor_compile_redistributes"

#: Key of a node's ``meta``: its `Group`.
GROUP = "dtensor_compile_group"


class Group(NamedTuple):
    """A group of collectives that are sent together.

    Attributes:
        name: identifies the group in a graph.
        limits: bytes of tensors at which a bucket is full, of the first bucket, the second and so on; the last one is
            that of all that follow. Empty: one bucket.
    """

    name: str
    limits: tuple[int, ...] = ()

    def limit(self, bucket: int) -> float:
        """Bytes at which a bucket is full; `bucket` counts from 0."""
        return self.limits[min(bucket, len(self.limits) - 1)] if self.limits else float("inf")


def send_with(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Notes that the collective whose result `tensor` is belongs to `group`; returns `tensor`."""
    node = node_of(tensor)
    if node is not None:
        node.meta[GROUP] = group
    return tensor


def mark_rank_uniform(tensor: torch.Tensor) -> torch.Tensor:
    """Notes that all ranks run the collective whose result is `tensor` in the same way; returns `tensor`."""
    node = node_of(tensor)
    if node is not None:
        node.meta[REDISTRIBUTES] = True
    return tensor
