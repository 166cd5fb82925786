"""Point-to-point messages of a convolution over a sharded image: ranks exchange the columns at the edges of their
shards."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from dtensor_compile.compat.apply_patches import patched_value
from dtensor_compile.compat.dtensor.specs import is_traced
from dtensor_compile.compat.patches import needs, patch

#: Performs messages: ``(tensors, whether each receives, peers in the group, group)``; returns one tensor per message.
Exchange = Callable[[list[torch.Tensor], list[bool], list[int], dist.ProcessGroup], Sequence[torch.Tensor]]


_DIST = patch("torch.distributed.tensor._tp_conv:dist")


@needs(
    "messages of convolutions over sharded images",
    _DIST,
    without="the columns at the edges of shards are wrong",
    essential=True,
    upstream="#161213, for messages in general",
    remove_when="_tp_conv exchanges edges by functional operators that are waited for",
)
@contextlib.contextmanager
def messages_of_convolutions(exchange: Exchange) -> Iterator[None]:
    """While active, messages of convolutions between traced tensors go through `exchange`.

    torch traces them as calls without a wait, into buffers that are read at once.
    """

    def batch(messages: Sequence[dist.P2POp]) -> list[dist.Work]:
        if not is_traced(messages[0].tensor):
            return dist.batch_isend_irecv(list(messages))
        receives = [message.op is dist.irecv for message in messages]
        group = messages[0].group or dist.group.WORLD
        assert group is not None  # the messages were made for a group
        came = exchange([m.tensor for m in messages], receives, [m.group_peer for m in messages], group)
        for message, receive, result in zip(messages, receives, came):
            if receive:
                message.tensor.copy_(result)
        return []

    names = {name: getattr(dist, name) for name in ("P2POp", "isend", "irecv", "get_rank", "get_world_size")}
    with patched_value(_DIST, types.SimpleNamespace(**names, batch_isend_irecv=batch)):
        yield
