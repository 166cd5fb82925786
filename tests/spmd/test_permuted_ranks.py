"""Meshes whose ranks are in another order than that of their numbers: shards are where the mesh says, eager and
compiled.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dtensor_compile.ir.mesh import groups_in_mesh_order, mesh_layout
from dtensor_compile.ir.spec import spec_text
from dtensor_compile.ops.redistribute import redistribute_op
from dtensor_compile.spmd import Mesh, manual_region, mark_sharding, shard_module
from dtensor_compile.spmd.hybrid_mesh import HybridMesh
from dtensor_compile.spmd.partition_spec import placements_to_axes
from dtensor_compile.testing import on_ranks, run_on_ranks
from tests.cases import mostly_slow
from tests.spmd.test_annotate import Mlp, compare

MESHES = [
    ([1, 0, 3, 2], (4,), (8, 4)),
    ([3, 1, 0, 2], (2, 2), (5, 6)),
    ([2, 3, 0, 1], (2, 2), (8, 4)),
    ([0, 2, 3, 1], (1, 4), (3, 5)),
]


def held_here(mesh, placements, t):
    """What this rank has by the table of the mesh (`Mesh.device_shards`); a term of a sum is the whole value."""
    axes = placements_to_axes([Replicate() if p.is_partial() else p for p in placements], mesh.mesh_shape, t.dim())
    shard = mesh.device_shards([entry or None for entry in axes], t.shape)[dist.get_rank()]
    return t[tuple(slice(begin, end) for begin, end in shard.index)].contiguous()


def _every_pair(ids, mesh_shape, shape):
    mesh = Mesh(ids, mesh_shape)
    device_mesh = mesh.to_device_mesh()
    assert device_mesh.mesh.tolist() == mesh.get_logical_mesh().tolist()
    specs = list(itertools.product((Replicate(), Shard(0), Shard(1), Partial()), repeat=len(mesh_shape)))
    for source in specs:
        t = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        x = DTensor.from_local(
            held_here(mesh, source, t), device_mesh, source, run_check=False, shape=t.shape, stride=t.stride()
        )
        for axis, p in enumerate(source):
            t = t * mesh.mesh_shape[axis] if p.is_partial() else t
        assert torch.equal(x.full_tensor(), t), source
        if not any(p.is_partial() for p in source):
            assert torch.equal(distribute_tensor(t, device_mesh, source).to_local(), x.to_local()), source
        for target in specs:
            if not any(p.is_partial() for p in target):
                here = held_here(mesh, target, t)
                assert torch.equal(x.redistribute(device_mesh, target).to_local(), here), (source, target)
                ours = redistribute_op(x.to_local(), spec_text(source), spec_text(target), mesh.text, list(shape))
                assert torch.equal(ours, here), (source, target)


@pytest.mark.parametrize("ids, mesh_shape, shape", mostly_slow(MESHES, MESHES[0], MESHES[3]))
def test_every_pair_of_placements(ids, mesh_shape, shape):
    run_on_ranks(4, _every_pair, ids, mesh_shape, shape, timeout=250)


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_marks_on_two_hosts_whose_ranks_alternate():
    hosts = [{"name": str(rank), "slice_index": 1 - rank % 2} for rank in range(4)]
    mesh = HybridMesh(ici_mesh_shape=(1, 2), dcn_mesh_shape=(2, 1), axis_names=("dp", "tp"), device_attributes=hosts)
    assert mesh.get_logical_mesh().tolist() == [[1, 3], [0, 2]]
    torch.manual_seed(4)
    model, x = Mlp(), torch.randn(4, 8)
    mark_sharding(model.up.weight, mesh, ("tp", None))
    mark_sharding(x, mesh, (("dp", "tp"), None))
    compare(model, x, torch.randn(5, 8))
    placed = shard_module(model, x)
    assert [row.spec for row in placed.placed][0] == "RS(0)"
    part = held_here(mesh, (Replicate(), Shard(0)), model.up.weight.full_tensor())
    assert torch.equal(model.up.weight.to_local(), part)
    rows = torch.arange(8.0).reshape(4, 2)
    region = manual_region(in_specs=((("dp", "tp"), None),), out_specs=(("dp", "tp"), None), mesh=mesh)(
        lambda part: part * 2
    )
    for run in (region, torch.compile(region, backend="dtensor_aten", fullgraph=True)):
        assert torch.equal(run(rows), rows * 2)


@on_ranks(4, timeout=280)
def test_meshes_of_torch_keep_their_groups():
    stock = DeviceMesh("cpu", [1, 0, 3, 2], mesh_dim_names=("x",))
    layout = mesh_layout(stock)
    assert not groups_in_mesh_order(stock, layout)
    mesh = Mesh.from_device_mesh(stock)  # the same grid, and groups that have its order
    ours = mesh.to_device_mesh()
    assert ours is not stock and groups_in_mesh_order(ours, layout) and ours == stock
    # A program over torch's mesh goes on meaning what torch makes of it, beside ours of the same text.
    x = torch.arange(8.0).reshape(4, 2)
    program = torch.compile(
        lambda d: (d * 2).redistribute(d.device_mesh, [Replicate()]), backend="dtensor_aten", fullgraph=True
    )
    for where in (stock, ours, stock):
        d = DTensor.from_local(x[dist.get_rank()][None], where, [Shard(0)], run_check=False)
        assert torch.equal(program(d).to_local(), d.full_tensor() * 2), where is ours
    grid = Mesh([3, 1, 0, 2], (2, 2), ("a", "b")).to_device_mesh()
    assert (
        groups_in_mesh_order(grid["b"], mesh_layout(grid["b"])) and Mesh.from_device_mesh(grid).to_device_mesh() is grid
    )
