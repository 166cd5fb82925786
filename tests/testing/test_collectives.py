"""Collectives that really run are counted, whoever calls them."""

import torch
import torch.distributed as dist

from dtensor_compile.testing import on_ranks
from dtensor_compile.testing.count_collectives import collectives_run


@on_ranks(2)
def test_collectives_are_counted_and_messages_are_not():
    def program():
        x = torch.ones(4)
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(8), x)
        dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)

    assert collectives_run(program) == 2
    assert collectives_run(lambda: None) == 0
