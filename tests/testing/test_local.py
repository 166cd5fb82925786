"""All ranks in one process: eager on LocalTensor, compiled in threads that take turns."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_compile import cli
from dtensor_compile.compat.distributed.rank_threads import DeadlockError, run_in_threads
from dtensor_compile.compat.dtensor.local_tensor import local_tensors, of_rank
from dtensor_compile.testing import make_mesh, parity
from dtensor_compile.testing.local import compare_locally, run_eager
from dtensor_compile.testing.parity import Case, Settings, sum_of_squares

ATEN = Settings(options={"kernels": "aten"})


# ---- ranks that take turns -----------------------------------------------------------------------------------------


def test_collectives_move_what_they_do_between_processes():
    def body(rank):
        mine = torch.arange(3.0) + rank
        total, largest, gathered = mine.clone(), mine.clone(), [torch.empty(3) for _ in range(3)]
        dist.all_reduce(total)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_gather(gathered, mine)
        scattered = torch.empty(1)
        dist.reduce_scatter_tensor(scattered, mine, dist.ReduceOp.MAX)
        pair = dist.new_group([0, 2])
        if rank != 1:
            dist.broadcast(mine, 2, group=pair)
        exchanged = torch.empty(3)
        dist.all_to_all_single(exchanged, torch.full((3,), float(rank)))
        tensors = total, largest, torch.cat(gathered), scattered, mine, exchanged
        return dist.get_rank(), *(x.tolist() for x in tensors)

    everywhere = [3.0, 6.0, 9.0], [2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 1.0, 2.0, 3.0, 2.0, 3.0, 4.0]
    sent = [[2.0, 3.0, 4.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]
    assert run_in_threads(3, body) == [(r, *everywhere, [2.0 + r], sent[r], [0.0, 1.0, 2.0]) for r in range(3)]
    assert not dist.is_initialized()


def test_a_group_that_does_not_end_is_an_error(monkeypatch):
    def fail():
        raise AttributeError("no comms")

    monkeypatch.setattr(dist, "destroy_process_group", fail)
    with pytest.raises(AttributeError, match="no comms"):
        run_in_threads(2, lambda rank: rank)


def test_ranks_that_wait_for_each_other_end_at_once():
    def body(rank):
        if rank:
            dist.all_reduce(torch.ones(2))

    with pytest.raises(
        DeadlockError, match=r"rank 1 waits in AllReduce among ranks \[0, 1, 2\].*ranks \[0\] have ended"
    ):
        run_in_threads(3, body)


def test_a_rank_that_fails_ends_the_others():
    def body(rank):
        if rank == 1:
            raise ValueError("no such data")
        dist.all_reduce(torch.ones(2))

    with pytest.raises(ValueError, match="no such data") as raised:
        run_in_threads(2, body)
    assert raised.value.__notes__ == ["on rank 1"]


def test_each_rank_draws_from_its_own_generator():
    def body(rank):
        torch.manual_seed(3)
        first = torch.rand(2)
        dist.all_reduce(torch.ones(1))
        return torch.cat([first, torch.rand(2)]).tolist()

    before = torch.get_rng_state()
    torch.manual_seed(3)
    alone = torch.rand(4).tolist()
    torch.set_rng_state(before)
    assert run_in_threads(2, body) == [alone, alone] and torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_program_draws_the_same_on_each_rank_of_a_local_tensor():
    with local_tensors(3):
        drawn = torch.randn(4, generator=torch.Generator().manual_seed(5))
        filled = torch.zeros(4).normal_(generator=torch.Generator().manual_seed(5))
    wanted = torch.randn(4, generator=torch.Generator().manual_seed(5))
    for rank in range(3):
        assert torch.equal(of_rank(drawn, rank, None), wanted) and torch.equal(of_rank(filled, rank, None), wanted)


# ---- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 4])
@parity(mesh=(2, 2), names=("dp", "tp"), backend="dtensor_aten", optimizer=torch.optim.AdamW, local=True)
def test_a_training_step_with_dropout(rows, mesh):
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    return model, [torch.randn(rows, 6)]


@pytest.mark.slow
@parity(mesh=(3,), local=True)
def test_uneven_shards_partial_values_and_empty_shards_through_inductor(mesh):
    x = distribute_tensor(torch.randn(7, 5), mesh, [Shard(0)]).detach().requires_grad_()
    y = DTensor.from_local(torch.randn(2, 5), mesh, [Partial()], run_check=False).detach().requires_grad_()
    z = distribute_tensor(torch.randn(2, 5), mesh, [Shard(0)]).detach().requires_grad_()  # the third rank has none

    def step(x, y, z):
        return (x @ y.t()).redistribute(placements=[Shard(1)]), (z + y).redistribute(placements=[Replicate()])

    return step, [x, y, z]


def by_rank(mesh):
    weight = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])

    def step(x):
        wrong = 1.5 if torch.compiler.is_compiling() and mesh.get_local_rank() == 1 else 1
        return (weight * wrong + x).redistribute(placements=[Replicate()])

    return step, [distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])]


def test_a_difference_is_reported_with_its_rank_and_what_makes_it():
    @parity(mesh=(2,), local=True, backend="dtensor_aten", calls=1)
    def wrong(mesh):
        return by_rank(mesh)

    message = r"(?s)on ranks 0, 1:.*rank 0: output at local index \([23], .*Dynamo makes the difference"
    with pytest.raises(AssertionError, match=message):
        wrong()


def test_what_local_tensors_cannot_do_is_run_rank_by_rank():
    def make():
        mesh = make_mesh((2,), ("tp",))
        x = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])

        def step(x):
            local = x.to_local()
            return local * 2 if local.shape[0] > 1 else local + 1

        return step, [x], {}

    case = Case(make, loss=sum_of_squares, calls=1)
    assert "AssertionError" in run_eager(case, 2).refused
    comparison = compare_locally(case, 2, ATEN)
    assert not comparison.differences and "LocalTensor refuses" in comparison.reference


def test_the_command(capsys):
    target = f"{__name__}:by_rank"
    assert cli.main(["parity", target, "--mesh", "tp=2", "--local", "--backend", "aot_eager"]) == 1
    assert "rank 0: output" in capsys.readouterr().out
    right = ["parity", "tests.testing.test_command:model", "--mesh", "tp=2", "--local", "--kernels", "aten"]
    assert cli.main([*right, "--optimizer", "sgd"]) == 0
    assert "on 2 ranks in one process (eager on LocalTensor)" in capsys.readouterr().out
    assert cli.main(["parity", target, "--mesh", "tp=2", "--local", "--minify", "x.py"]) == 2
    assert cli.main(["parity", "tests.testing.test_command:raises", "--mesh", "tp=2", "--local"]) == 2
    assert "no such data" in capsys.readouterr().err
