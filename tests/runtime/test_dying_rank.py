"""A rank that ends or stands still in the middle of a step: the others get an error, and none waits for ever."""

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from dtensor_compile.testing import run_on_ranks
from dtensor_compile.testing.ranks import RankError

#: Time-out of the process group, and what may pass until the error is there.
SECONDS, BOUND = 3.0, 20.0


def step_without_rank_1(dies: bool, backend: str) -> None:
    """Two good steps; in the third, rank 1 leaves between forward and backward. Rank 0 raises what it sees, and after
    how long.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_()

    @torch.compile(backend=backend, fullgraph=True)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        whole = weight.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        return (x @ whole).square().sum()

    for _ in range(2):
        loss_of(torch.ones(2, 4)).backward()
    loss = loss_of(torch.ones(2, 4))
    group.set_timeout(datetime.timedelta(seconds=SECONDS))
    if dist.get_rank() == 1:
        if dies:
            os._exit(7)
        time.sleep(2 * SECONDS)
        raise SystemExit("stood still")
    began = time.monotonic()
    try:
        loss.backward()
    except RuntimeError as error:
        seconds = time.monotonic() - began
        assert seconds < BOUND, f"after {seconds:.1f} s"
        raise RuntimeError(f"rank 0 was told: {error}") from error


@pytest.mark.parametrize("dies", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_others_get_an_error_within_the_time_out(dies):
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 0 was told: .*([Cc]onnection|[Tt]imed out)") as raised:
        run_on_ranks(2, step_without_rank_1, dies, "dtensor_aten")
    assert "no answer" not in str(raised.value) and time.monotonic() - began < 120
