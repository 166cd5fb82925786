"""Random operators over DTensors: eager's values for eager's seed, one mask for forward, backward and recomputation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from dtensor_compile.testing import assert_parity, make_mesh, on_ranks
from dtensor_compile.testing.parity import sum_of_squares


def argument(placement, rows=6):
    return distribute_tensor(torch.ones(rows, 4), make_mesh((2,), ("tp",)), [placement]).requires_grad_()


def drops(x):
    return F.dropout(x, 0.5)


def drops_in_a_recomputed_region(x):
    return checkpoint(lambda y: F.dropout(torch.tanh(y), 0.5) * y, x, use_reentrant=False)


def two_recomputed_regions(x, y):
    x = drops_in_a_recomputed_region(x * x.shape[0])
    return drops_in_a_recomputed_region(x) + y, drops_in_a_recomputed_region(y)


def drops_and_sends(x):
    y = F.dropout(x * 2, 0.3).redistribute(placements=[Replicate()])
    return F.dropout(y, 0.3)


def noise(x):
    return x * torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 5)


def fills(x):
    return x * x.detach().clone().bernoulli_(0.4) + torch.empty_like(x).uniform_()


def draws_beside_a_collective(x):
    """Nothing but the generator says that the last value is drawn after the first, which waits for what is sent."""
    first = F.dropout(x.redistribute(placements=[Replicate()]), 0.5)
    F.dropout(x, 0.5)
    second = F.dropout(x.to_local(), 0.5)
    return first, second @ second.T


def draws_what_nothing_uses(x):
    F.dropout(x, 0.5)
    y = x * 2
    torch.rand_like(y)
    return F.dropout(y, 0.3)


def draws_what_nothing_uses_without_a_gradient(x):
    F.dropout(x * 3, 0.5)
    x.detach().clone().bernoulli_(0.4)
    return x.detach() + torch.rand_like(x)


def every(x):
    return drops(x), drops_and_sends(x), noise(x), fills(x), draws_what_nothing_uses(x)


@pytest.mark.parametrize("placement, rows", [(Shard(0), 6), (Shard(0), 5), (Shard(1), 3), (Replicate(), 4)])
@on_ranks(2, timeout=240)
def test_values_gradients_and_states_equal_eagers(placement, rows):
    assert_parity(every, [argument(placement, rows)], loss=sum_of_squares, backend="dtensor_aten")


@pytest.mark.parametrize("program", [draws_what_nothing_uses, draws_what_nothing_uses_without_a_gradient])
@on_ranks(2, timeout=240)
def test_values_that_nothing_uses_are_drawn(program):
    assert_parity(program, [argument(Shard(0))], loss=sum_of_squares, backend="dtensor_aten")


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_a_mask_in_a_recomputed_region():
    for placement in (Shard(0), Replicate()):
        assert_parity(drops_in_a_recomputed_region, [argument(placement)], loss=sum_of_squares, backend="dtensor_aten")
    assert_parity(drops_in_a_recomputed_region, [argument(Shard(0))], loss=sum_of_squares)
    sizes = {"backend": "dtensor_aten", "dynamic": True}  # symbols are saved as well
    assert_parity(drops_in_a_recomputed_region, [argument(Shard(0))], loss=sum_of_squares, **sizes)
    assert_parity(two_recomputed_regions, [argument(Shard(0)), argument(Shard(1))], loss=sum_of_squares, **sizes)


@on_ranks(2, timeout=280)
def test_through_inductor():
    assert_parity(every, [argument(Shard(0))], loss=sum_of_squares)


@pytest.mark.parametrize("schedule", [True, False])
@on_ranks(2, timeout=240)
def test_kernels_draw_in_the_order_of_the_program(schedule):
    assert_parity(
        draws_beside_a_collective, [argument(Shard(0), 512)], loss=sum_of_squares, options={"schedule": schedule}
    )


@on_ranks(2, timeout=240)
def test_forward_and_backward_see_one_mask_and_seeds_are_honoured():
    run = torch.compile(drops, backend="dtensor_aten", fullgraph=True)
    x = argument(Shard(0))
    torch.manual_seed(5)
    first = run(x)
    first.to_local().sum().backward()
    assert torch.equal(x.grad.to_local(), first.to_local().detach())  # x is one: mask / (1 - p) either way
    second = run(x)
    torch.manual_seed(5)
    assert torch.equal(run(x).to_local(), first.to_local()) and not torch.equal(second.to_local(), first.to_local())


@on_ranks(2, timeout=240)
def test_replicas_agree_and_shards_of_other_seeds_differ():
    from torch import distributed as dist

    run = torch.compile(drops, backend="dtensor_aten", fullgraph=True)
    torch.manual_seed(5)
    replica = run(argument(Replicate(), 64)).to_local()
    torch.manual_seed(5 + dist.get_rank())
    shard = run(argument(Shard(0), 64)).to_local()
    for value, equal in ((replica, True), (shard, False)):
        values = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(values, value.detach().contiguous())
        assert torch.equal(*values) is equal


@on_ranks(2, timeout=240)
def test_initialization_inside_of_the_region():
    def program(x):
        weight, bias = torch.empty_like(x), torch.empty_like(x)
        nn.init.kaiming_normal_(weight)
        nn.init.uniform_(bias, -1, 1)
        return weight, bias

    for placement in (Shard(0), Replicate()):
        assert_parity(program, [argument(placement)], backend="dtensor_aten")
