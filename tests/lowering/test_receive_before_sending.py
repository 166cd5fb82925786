"""Collectives in which gloo's ranks would take turns go as messages."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase

from dtensor_compile.lowering import receive_before_sending as module
from dtensor_compile.lowering.receive_before_sending import receive_before_sending
from dtensor_compile.ops.messages import all_gather, all_gather_coalesced, all_to_all
from dtensor_compile.testing import graph_text, on_ranks, run_on_ranks
from dtensor_compile.topology.links import CLUSTERS
from tests.schedule.test_schedule_graph import changed, traced

_c10d = torch.ops._c10d_functional
_wait = _c10d.wait_tensor


def gathered(x):
    n, group = dist.get_world_size(), dist.group.WORLD.group_name
    return _wait(_c10d.all_gather_into_tensor(x, n, group)) * 2


def exchanged(x):
    n, group = dist.get_world_size(), dist.group.WORLD.group_name
    splits = [x.shape[0] // n] * n
    return _wait(_c10d.all_to_all_single(x, splits, splits, group)) * 2


def uneven(x):
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    sent, received = ([0, 4], [0, 3]) if rank == 0 else ([3, 1], [4, 1])
    return _wait(_c10d.all_to_all_single(x, received, sent, group)) * 2


def result(function, shape=(4, 3), least=0, topology=None):
    stock, module.LEAST = module.LEAST, least
    try:
        return changed(lambda graph: receive_before_sending(graph, topology), function, shape)
    finally:
        module.LEAST = stock


class Golden(TestCase):
    maxDiff = None

    def test_an_exchange(self):
        (text, reasons), other = run_on_ranks(2, result, exchanged)
        assert (text, reasons) == other and "take turns" in reasons[0]
        self.assertExpectedInline(
            text,
            """\
x_1: [4, 3]
all_to_all_single: [4, 3] = all_to_all_single(x_1, [2, 2], [2, 2])
wait_tensor: [4, 3] = wait_tensor(all_to_all_single)
mul: [4, 3] = mul(wait_tensor, 2)
return mul
""",
        )


def test_a_gather_of_two_ranks_goes_as_messages():
    assert len(run_on_ranks(2, result, gathered)[0][1]) == 1


def test_a_gather_of_four_ranks_does_where_they_do_not_share_a_link():
    assert run_on_ranks(4, result, gathered)[0][1] == []
    for hosts, count in ((1, 1), (2, 0), (0, 1)):
        topology = dataclasses.replace(CLUSTERS["cpu-1gbit"], ranks_per_host=hosts)
        assert len(run_on_ranks(4, result, gathered, (4, 3), 0, topology)[0][1]) == count


def test_an_exchange_of_four_ranks():
    assert len(run_on_ranks(4, result, exchanged, (8, 3))[0][1]) == 1


def test_an_uneven_exchange():
    assert len(run_on_ranks(2, result, uneven)[0][1]) == 1


@on_ranks(2)
def test_what_stays():
    small = traced(gathered, (4, 3))
    own = traced(exchanged, (4, 3), redistributes=False)
    for gm in (small, own):
        before = graph_text(gm.graph)
        assert receive_before_sending(gm.graph) == [] and graph_text(gm.graph) == before
    assert len(receive_before_sending(traced(gathered, (1 << 16, 3)).graph)) == 1


def _same_as_torch(dtype):
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    torch.manual_seed(rank)
    x = torch.randint(0, 2, (4 * n, 3)).to(dtype)
    pairs = [
        (all_gather(x, n, group), _c10d.all_gather_into_tensor(x, n, group)),
        (all_gather(x.t(), n, group), _c10d.all_gather_into_tensor(x.t(), n, group)),
        (all_to_all(x, [4] * n, [4] * n, group), _c10d.all_to_all_single(x, [4] * n, [4] * n, group)),
    ]
    if dtype != torch.bool:
        several = [x, x.t(), x[:0], x[:1, 0]]
        mine, stock = (op(several, n, group) for op in (all_gather_coalesced, _c10d.all_gather_into_tensor_coalesced))
        pairs += zip(mine, stock)
    for mine, stock in pairs:
        assert torch.equal(_wait(mine), _wait(stock))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_operators_are_torchs(ranks, dtype):
    run_on_ranks(ranks, _same_as_torch, dtype)


@on_ranks(3)
def test_many_are_under_way_beside_messages_of_the_program():
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    started, received = [], []
    for i in range(20):
        started.append(all_gather(torch.full((1000 + i,), float(i + rank)), n, group))
        received.append(torch.empty(1000 + i))
        works = [
            dist.irecv(received[-1], (rank + 1) % n),
            dist.isend(torch.full((1000 + i,), 100.0 * i), (rank - 1) % n),
        ]
        for work in works:
            work.wait()
    for i in reversed(range(20)):
        assert torch.equal(_wait(started[i]).view(n, -1)[:, 0], torch.arange(i, i + n, dtype=torch.float32))
        assert (received[i] == 100.0 * i).all()
