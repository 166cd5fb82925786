"""Process groups over several dims of a mesh: made by their own ranks alone, once, before anything is compiled."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_compile.compat.distributed.device_meshes import all_groups
from dtensor_compile.ir import mesh as mesh_module
from dtensor_compile.ops.redistribute import plan_of
from dtensor_compile.recording.recorder import record
from dtensor_compile.store import rendezvous as meet
from dtensor_compile.testing import on_ranks


def gathered(x):
    return x.redistribute(placements=[Replicate(), Replicate()]).to_local() * 2


@pytest.mark.slow
@on_ranks(5)
def test_ranks_outside_of_the_mesh_hold_up_nobody():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    if dist.get_rank() == 4:
        return  # this rank compiles nothing, and the others do not wait for it
    part = torch.arange(3.0) + 10 * dist.get_rank()
    x = DTensor.from_local(part, mesh, [Shard(0), Shard(0)])
    for _ in range(2):
        torch._dynamo.reset()
        with record() as recording:
            out = torch.compile(gathered, backend="dtensor_aten", fullgraph=True)(x)
        assert torch.equal(out, torch.cat([torch.arange(3.0) + 10 * rank for rank in range(4)]) * 2)
        assert [(c.kind, c.ranks) for c in recording.collectives] == [("all_gather", (0, 1, 2, 3))]
        assert sum(ranks == (0, 1, 2, 3) for _, ranks, _ in all_groups()) == 1


def local_mean(x):
    return x.to_local().mean()


@pytest.mark.slow
@on_ranks(5)
def test_a_rank_that_compiles_alone_does_not_wait_for_ever():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    if dist.get_rank() == 4:
        return
    x = DTensor.from_local(torch.arange(3.0) + 10 * dist.get_rank(), mesh, [Shard(0), Shard(0)])
    whole = torch.cat([torch.arange(3.0) + 10 * rank for rank in range(4)]) * 2
    with mock.patch.object(mesh_module, "_merged", {}):
        if dist.get_rank() in (0, 3):  # one that would gather the others, and one that would come
            with mock.patch.object(meet, "PATIENCE", 0.5):
                assert torch.compile(local_mean, backend="dtensor_aten", fullgraph=True)(x) == 1 + 10 * dist.get_rank()
            assert not mesh_module.merges(mesh_module.mesh_text(mesh))
            alone = plan_of("S(0)S(0)", "RR", mesh_module.mesh_layout(mesh), (12,), 4)
            assert [step.mesh_dims for step in alone] == [(1,), (0,)]
        x.full_tensor()  # now all four are here
        with mock.patch.object(meet, "PATIENCE", 60.0):
            out = torch.compile(gathered, backend="dtensor_aten", fullgraph=True)(x)
        assert torch.equal(out, whole) and mesh_module.merges(mesh_module.mesh_text(mesh))
