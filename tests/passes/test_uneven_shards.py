"""Passes where shards are uneven: a rank that sees a size of 1, or a view that changes nothing, decides as the others
do.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dtensor_compile import record
from dtensor_compile.testing import assert_parity, make_mesh, run_on_ranks

R = [Replicate()]


def sums(x, y):
    return x.redistribute(placements=R) - y.redistribute(placements=R)


def local_sums(x, y):
    return x.redistribute(placements=R).to_local() + y.redistribute(placements=R).to_local()


def past_a_transpose(x, y):
    return torch.relu(x.redistribute(placements=R)).t().redistribute(placements=[Shard(1)]) + y.t()


def past_a_view(x, y):
    """On a rank that holds one row of one, the view changes nothing."""
    return x.redistribute(placements=R).view(1, -1).redistribute(placements=[Shard(1)]) * 2, y


def narrow(x, y):
    return x.redistribute(placements=R).to(torch.bfloat16), y


def reduced(x, y):
    return torch.exp(x.redistribute(placements=R)).sum(), y


#: Program, global shape, the pass that changes it.
PROGRAMS = [
    (sums, (5, 3), "merge_sums"),
    (local_sums, (5, 3), "merge_sums"),
    (local_sums, (4, 1), "merge_sums"),
    (past_a_transpose, (5, 3), "compose_across_operators"),
    (past_a_transpose, (7, 1), "compose_across_operators"),
    (past_a_view, (3, 1), "compose_across_operators"),
    (narrow, (5, 3), "send_in_narrow_dtype"),
    (reduced, (5, 1), "reduce_before_sending"),
]


def decided(function, inputs):
    """Names of the passes that changed something, and the collectives that are left."""
    torch._dynamo.reset()
    with record() as recording:
        options = {
            "strict": True,
            "disable_passes": ("bucket_collectives",),
        }  # each collective by itself, so that they can be counted
        torch.compile(function, backend="dtensor_aten", options=options)(*inputs)
    return [decision.kind for decision in recording.decisions], [c.kind for c in recording.collectives]


def on_uneven_shards(world):
    mesh = make_mesh((world,), ("tp",))
    found = []
    for function, shape, _ in PROGRAMS:
        if shape[0] % world == 0:
            continue
        torch.manual_seed(0)
        x, y = (distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for _ in range(2))
        found.append((function.__name__, shape, *decided(function, (x, y))))
        assert_parity(function, [x, y], backend="dtensor_aten", options={"strict": True}, calls=1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_make_the_same_decisions_and_numbers_are_eagers(world):
    first, *others = run_on_ranks(world, on_uneven_shards, world)
    assert all(other == first for other in others)
    wanted = [name for _, shape, name in PROGRAMS if shape[0] % world]
    missing = [(row[:2], name) for row, name in zip(first, wanted, strict=True) if name not in row[2]]
    assert not missing, missing


def layers(x):
    """Three times the same operators, of which torch decides one time."""
    gathered = [(x + i).redistribute(placements=R) for i in range(3)]
    viewed = [torch.relu(y).view(1, -1).view(-1) for y in gathered]
    return [y.redistribute(placements=[Shard(0)]) * 2 for y in viewed]


def after_an_eager_call(world):
    """Each rank has run other operators before, so that torch knows other decisions."""
    mesh = make_mesh((world,), ("tp",))
    x = distribute_tensor(torch.randn(7, 1), mesh, [Shard(0)])
    x + dist.get_rank() if dist.get_rank() % 2 else torch.relu(x * 2)
    assert_parity(layers, [x], backend="dtensor_aten", options={"strict": True}, calls=1)
    return decided(layers, (x,))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_done_in_one_layer_is_done_in_all(world):
    first, *others = run_on_ranks(world, after_an_eager_call, world)
    assert all(other == first for other in others)
    assert first == (["compose_across_operators"] * 3, [])


def broadcast_on_some_ranks(world):
    """``b`` has one row on every rank, and what it is added to has one row on the last rank alone."""
    mesh = make_mesh((world,), ("tp",))
    a, c = (DTensor.from_local(torch.randn(world + 1, 2), mesh, [Partial()], run_check=False) for _ in range(2))
    b = DTensor.from_local(torch.randn(1, 2), mesh, [Partial()], run_check=False)

    def function(a, b, c):
        rows, row, more = (
            a.redistribute(placements=[Shard(0)]),
            b.redistribute(placements=R),
            c.redistribute(placements=[Shard(0)]),
        )
        return rows.to_local() + row.to_local() + more.to_local()

    assert_parity(function, [a, b, c], backend="dtensor_aten", options={"strict": True}, calls=1)
    return decided(function, (a, b, c))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_is_broadcast_on_some_ranks_alone_is_left_on_all(world):
    first, *others = run_on_ranks(world, broadcast_on_some_ranks, world)
    assert all(other == first for other in others) and len(first[1]) == 3
