"""Meshes and groups that the compiled program makes, ``with mesh:``, tensors of ranks, meshes in containers."""

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtensor_compile.compat.distributed.device_meshes import all_groups
from dtensor_compile.testing import make_mesh, on_ranks
from tests.variables.programs import assert_like_eager

ATEN = {"backend": "dtensor_aten"}


def _meshes(x):
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def _constructor(x):
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("tp",))


def _constructor_from_list(x):
    return DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("tp",))


def _from_group(x):
    return DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("tp",))


def _from_new_group(x):
    return DeviceMesh.from_group(dist.new_group([1, 0]), "cpu", mesh_dim_names=("tp",))


@pytest.mark.parametrize("make", [_meshes, _constructor, _constructor_from_list, _from_group, _from_new_group])
@on_ranks(2)
def test_mesh_made_inside(make):
    def program(x):
        mesh = make(x)
        d = DTensor.from_local(x, mesh, [Shard(0)], run_check=False) * mesh.size()
        return d.full_tensor(), d.placements, mesh.mesh_dim_names

    argument_sets = [(torch.ones(rows, 2),) for rows in (2, 2, 3, 4)]
    assert_like_eager(program, *argument_sets, graphs=2, **ATEN)


@on_ranks(2)
def test_groups_are_made_once():
    def program(x):
        group = dist.new_group([0, 1])
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        return x * dist.get_world_size(group) * mesh.size(0)

    run = torch.compile(program, **ATEN, fullgraph=True)
    before = len(all_groups())
    run(torch.ones(2))
    made = len(all_groups()) - before
    assert made >= 1
    for rows in (2, 3, 4):  # the second size traces again
        assert run(torch.ones(rows)).tolist() == [4.0] * rows
    assert len(all_groups()) - before == made


@on_ranks(2)
def test_each_place_and_each_round_of_a_loop_has_a_group_of_its_own():
    def program(x):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        groups.append(dist.new_group([0, 1]))
        return x * 2, [group.group_name for group in groups], groups[0] is groups[1]

    first = torch.compile(program, **ATEN, fullgraph=True)(torch.ones(2))
    assert len(set(first[1])) == 3 and not first[2]


@on_ranks(2)
def test_code_with_a_group_that_was_destroyed_is_compiled_again():
    def program(x):
        group = dist.new_group([0, 1])
        return x * 2, group

    run = torch.compile(program, **ATEN, fullgraph=True)
    group = run(torch.ones(2))[1]
    assert run(torch.ones(2))[1] is group
    dist.barrier()  # else a rank ends the group while the other one still connects
    dist.destroy_process_group(group)
    assert run(torch.ones(2))[1] is not group


@on_ranks(2)
def test_group_without_this_rank():
    def program(x):
        group = dist.new_group([0])
        return x * (3 if group == dist.GroupMember.NON_GROUP_MEMBER else 2)

    assert_like_eager(program, (torch.ones(2),), (torch.ones(2),), graphs=1, **ATEN)


@on_ranks(2)
def test_error_of_a_mesh_made_inside_is_the_programs_to_catch():
    def program(x):
        try:
            return x * init_device_mesh("cpu", (64,)).size()
        except RuntimeError:
            return x * 5

    assert_like_eager(program, (torch.ones(2),), graphs=1, **ATEN)


@on_ranks(2)
def test_mesh_of_a_shape_that_only_the_data_has_breaks_the_graph():
    def program(x):
        y = x * 2
        return y * init_device_mesh("cpu", (int(x.sum()), 1)).size()

    assert_like_eager(program, (torch.ones(2),), fullgraph=False, **ATEN)


@on_ranks(4)
def test_derived_meshes_on_four_ranks():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    line = make_mesh((4,), ("world",))

    def program(x, mesh, line):
        both = line._unflatten(0, (2, 2), ("a", "b"))
        joined = DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
        parts = mesh._get_all_submeshes("tp")
        a = DTensor.from_local(x, both, [Shard(0), Shard(1)]).redistribute(both, [Replicate(), Shard(0)])
        b = DTensor.from_local(x, joined, [Shard(1), Replicate()]).full_tensor()
        c = DTensor.from_local(x, both["b"], [Shard(0)]).full_tensor()
        return (
            a.to_local(),
            b,
            c,
            both.get_coordinate(),
            joined.shape,
            [part.mesh.tolist() for part in parts],
            both["a"].size(),
        )

    assert_like_eager(
        program, *((torch.arange(4.0).reshape(2, 2) + rank, mesh, line) for rank in range(3)), graphs=1, **ATEN
    )


@on_ranks(2)
def test_with_mesh():
    mesh, other = make_mesh((2,), ("tp",)), make_mesh((2, 1), ("a", "b"))

    def inner(x):
        return DTensor.from_local(x, placements=[Shard(0)])

    def program(x):
        with mesh as m:
            a = inner(x)
            with other:
                b = DTensor.from_local(x, None, [Shard(0), Replicate()])
            c = distribute_tensor(torch.ones(4, 2), placements=[Shard(0)], src_data_rank=None)
            return a * 2, b, c, m.size(), m is mesh

    assert_like_eager(program, (torch.ones(2, 2),), (torch.ones(2, 2),), graphs=1, **ATEN)


@on_ranks(2)
def test_with_mesh_around_the_call_is_guarded():
    meshes = make_mesh((2,), ("tp",)), make_mesh((2,), ("other",))

    def program(x):
        return (DTensor.from_local(x, placements=[Shard(0)]) * 2).device_mesh.mesh_dim_names, x * 2

    run = torch.compile(program, **ATEN, fullgraph=True)
    for mesh in (*meshes, *meshes):
        with mesh:
            assert run(torch.ones(2))[0] == mesh.mesh_dim_names
    with pytest.raises(Exception, match="No device mesh is currently active"):
        run(torch.ones(2))


@on_ranks(2)
def test_with_mesh_ends_when_tracing_ends_inside():
    mesh = make_mesh((2,), ("tp",))

    def breaks(x):
        with mesh:
            y = x * 2
            torch._dynamo.graph_break()
            return DTensor.from_local(y, placements=[Shard(0)]).full_tensor()

    def raises(x):
        try:
            with mesh:
                raise ValueError
        except ValueError:
            return x * 2

    assert_like_eager(breaks, (torch.ones(2),), fullgraph=False, **ATEN)
    assert_like_eager(raises, (torch.ones(2),), **ATEN)
    with pytest.raises(RuntimeError, match="No device mesh is currently active"):
        DTensor.from_local(torch.ones(2), placements=[Shard(0)])


@on_ranks(4)
def test_tensors_of_ranks_are_constants():
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def program(x):
        ranks = mesh.mesh
        first = int(ranks[0, 0])
        rows = [row.tolist() for row in ranks]
        rank = dist.get_rank()
        mine = (ranks == rank).nonzero().flatten().tolist()
        last = ranks.flatten().max().item()
        return x * sum(mesh["tp"].mesh.tolist()) + first + last, rows, mine, ranks + 1, ranks.dtype

    assert_like_eager(program, (torch.ones(2),), (torch.ones(2),), (torch.ones(3),), (torch.ones(4),), graphs=2, **ATEN)


@on_ranks(2)
def test_a_tensor_of_ranks_that_is_written_to_is_no_constant():
    mesh = make_mesh((2,), ("tp",))

    def program(x):
        ranks = mesh.mesh
        view = ranks.view(-1)
        view[0] = 7
        return x * 2, ranks + 1, mesh.mesh.tolist()

    def reads(x):
        ranks = mesh.mesh.clone()
        ranks.add_(3)
        return x * ranks[0].item()

    assert_like_eager(program, (torch.ones(2),), **ATEN)
    assert_like_eager(reads, (torch.ones(2),), fullgraph=False, **ATEN)


class _Layout(NamedTuple):
    mesh: DeviceMesh
    placements: tuple


@dataclasses.dataclass
class _Plan:
    mesh: DeviceMesh
    placements: list
    table: dict


@on_ranks(4)
def test_modules_named_tuples_dataclasses_and_dicts_hold_meshes():
    mesh = make_mesh((2, 2), ("dp", "tp"))

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layout = _Layout(mesh, (Shard(0), Replicate()))
            self.plan = _Plan(mesh["tp"], [Shard(1)], {mesh["tp"]: "tp", mesh["dp"]: "dp"})

        def forward(self, x):
            local = _Layout(self.plan.mesh, tuple(self.plan.placements))
            plan = _Plan(self.layout.mesh, list(self.layout.placements), {self.layout.mesh["dp"]: 2})

            def wrap(layout):
                return DTensor.from_local(x, layout.mesh, layout.placements)

            names = [self.plan.table[mesh[name]] for name in ("dp", "tp")]
            return (
                wrap(self.layout).full_tensor(),
                wrap(local).full_tensor(),
                names,
                plan.table[mesh["dp"]],
                plan.placements,
            )

    x = torch.arange(4.0).reshape(2, 2)
    assert_like_eager(Block(), (x,), (x + 1,), graphs=1, **ATEN)


@on_ranks(2)
def test_copies():
    mesh = make_mesh((2,), ("tp",))

    def program(x):
        d = DTensor.from_local(x, mesh, [Shard(0)])
        deep, flat = copy.deepcopy(list(d.placements)), copy.copy(d.placements[0])
        other = copy.deepcopy({"placements": (Shard(1), Replicate())})
        equal = copy.deepcopy(mesh) == mesh, copy.copy(mesh) == mesh, flat is d.placements[0], flat == deep[0]
        return d.redistribute(placements=deep) * 2, other["placements"], equal

    assert_like_eager(program, (torch.ones(2, 2),), (torch.ones(2, 2),), graphs=1, **ATEN)
