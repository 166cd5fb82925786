"""Mesh text: parses back, says what torch's DeviceMesh says, and is the same on every rank."""

import gc

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_compile.compat.distributed import device_meshes as compat_mesh
from dtensor_compile.compat.distributed.device_meshes import group_named, new_group_in_order
from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.errors import NoProcessGroupError, SpecTextError, UnsupportedTorchError
from dtensor_compile.ir.mesh import (
    MeshDim,
    MeshLayout,
    group_dim_name,
    group_name,
    mesh_in_its_order,
    mesh_layout,
    mesh_text,
    parse_mesh,
)
from dtensor_compile.testing import make_mesh, on_ranks, run_on_ranks


@st.composite
def layouts(draw):
    names = draw(
        st.lists(st.one_of(st.none(), st.from_regex(r"[a-z_][a-z_0-9]{0,6}", fullmatch=True)), min_size=1, max_size=3)
    )
    sizes = [draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)) for _ in names]
    dims, stride = [], 1
    for name, parts in zip(reversed(names), reversed(sizes)):
        strides = []
        for size in reversed(parts):
            strides.insert(0, stride)
            stride *= size
        dims.insert(0, MeshDim(name, tuple(parts), tuple(strides)))
    ranks = draw(
        st.one_of(
            st.just(list(range(stride))), st.permutations(range(stride)), st.just([7 * i + 3 for i in range(stride)])
        )
    )
    return MeshLayout(draw(st.sampled_from(["cpu", "cuda", "meta"])), tuple(dims), tuple(ranks))


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_random_layout_parses_back(layout):
    assert parse_mesh(str(layout)) == layout


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(layouts())
def test_more_random_layouts_parse_back(layout):
    assert parse_mesh(str(layout)) == layout


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_group_holds_the_ranks_that_differ_along_one_dim(layout):
    for rank in layout.ranks:
        here = layout.coordinate(rank)
        for dim in range(len(layout.dims)):
            group = layout.group(rank, dim)
            assert group[here[dim]] == rank
            others = [[c for d, c in enumerate(layout.coordinate(r)) if d != dim] for r in group]
            assert others == [others[0]] * layout.shape[dim]
            assert [layout.coordinate(r)[dim] for r in group] == list(range(layout.shape[dim]))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cpu",
        "cpu[tp=2:1]",
        "cpu[tp=2]@2",
        "cpu[tp=x:1]@2",
        "cpu[tp=2:1*]@2",
        "cpu[tp=2:1:3]@2",
        "cpu[]@2",
        "cpu[tp=2:1,]@2",
        "cpu[tp=2:1]@",
        "cpu[tp=2:1]@.",
        "cpu[tp=2:1]@0..1",
        "cpu[tp=0:1]@2",
        "cpu[tp=2:0]@2",
        "cpu[tp=4:1]@2",
        "cpu[tp=2:1]@1.1",
        "cpu[tp=2:1]@2\n",
    ],
)
def test_text_that_is_no_mesh(text):
    with pytest.raises(SpecTextError, match="mesh"):
        parse_mesh(text)


def test_rank_order_of_groups():
    assert parse_mesh("cpu[dp=2:2,tp=2:1]@4").in_rank_order
    assert parse_mesh("cpu[dp=2:2,tp=2:1]@0.2.1.3").in_rank_order
    assert not parse_mesh("cpu[dp=2:2,tp=2:1]@1.0.3.2").in_rank_order
    assert not parse_mesh("cpu[p=4:1]@3.1.0.2").in_rank_order


def meshes_of_four_ranks():
    # Not make_mesh's, which other tests share: torch redistributes otherwise over a mesh that was flattened once.
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    line = make_mesh((4,), ("tp",))
    return {
        "line": line,
        "grid": grid,
        "cube": cube,
        "no names": make_mesh((2, 2)),
        "slice dp": grid["dp"],
        "slice tp": grid["tp"],
        "slice of two": cube["pp", "tp"],
        "slice of size one": cube["dp"],
        "flattened": grid._flatten("all"),
        "flattened slice": cube["pp", "tp"]._flatten("pp_tp"),
        "permuted": DeviceMesh("cpu", [3, 1, 0, 2], mesh_dim_names=("p",)),
        "permuted grid": DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("a", "b")),
        "some ranks": DeviceMesh("cpu", [1, 3]),
        "some ranks, a grid": DeviceMesh("cpu", [[2, 0]], mesh_dim_names=("a", "b")),
        "one rank": DeviceMesh("cpu", [2]),
    }


def texts_and_facts():
    rank, found = dist.get_rank(), {}
    for name, mesh in meshes_of_four_ranks().items():
        layout = mesh_layout(mesh)
        assert parse_mesh(mesh_text(mesh)) == layout, name
        coordinate = mesh.get_coordinate()
        assert layout.coordinate(rank) == (None if coordinate is None else tuple(coordinate)), name
        assert layout.shape == tuple(mesh.shape), name
        if coordinate is not None:
            for dim in range(mesh.ndim):
                group = mesh.get_group(dim)
                assert sorted(layout.group(rank, dim)) == sorted(dist.get_process_group_ranks(group)), (name, dim)
                along = mesh.mesh[tuple(slice(None) if d == dim else c for d, c in enumerate(coordinate))]
                assert list(layout.group(rank, dim)) == along.tolist(), (name, dim)
                assert group_name(mesh_text(mesh), dim, rank) == group.group_name, (name, dim)
        found[name] = mesh_text(mesh)
    return found


def test_layout_agrees_with_torch_and_text_is_the_same_on_every_rank():
    first, *others = run_on_ranks(4, texts_and_facts)
    assert others == [first] * 3
    assert first["grid"] == "cpu[dp=2:2,tp=2:1]@4"
    assert first["slice tp"] == "cpu[tp=2:1]@4"
    assert first["flattened"] == "cpu[all=4:1]@4"
    assert first["permuted"] == "cpu[p=4:1]@3.1.0.2"
    assert first["one rank"] == "cpu[1:1]@2."


@on_ranks(2)
def test_group_of_a_mesh_that_is_gone_is_found_by_its_ranks():
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("short_lived",))
    text = mesh_text(mesh)
    del mesh
    gc.collect()
    assert dist.get_process_group_ranks(group_named(group_name(text, 0, dist.get_rank()))) == [0, 1]


def test_a_mesh_of_a_job_that_this_process_has_left_names_no_group_of_the_next_job():
    kept = []
    for name in ("dp", "tp"):  # both jobs call their groups the same
        with simulated_job(2, 0):
            kept.append(init_device_mesh("cpu", (2,), mesh_dim_names=(name,)))
            mesh_text(kept[-1])
            group = kept[-1].get_group()
            assert group_dim_name(group) == name


@on_ranks(2)
def test_two_meshes_with_one_text_and_one_of_them_gone():
    kept = DeviceMesh("cpu", [0, 1], mesh_dim_names=("twin",))
    text = mesh_text(kept)
    assert mesh_text(DeviceMesh("cpu", [0, 1], mesh_dim_names=("twin",))) == text
    gc.collect()
    assert mesh_text(kept) == text
    assert group_name(text, 0, dist.get_rank()) == kept.get_group(0).group_name


@on_ranks(4)
def test_group_that_was_never_made_is_an_error_that_names_the_ranks():
    rank = dist.get_rank()
    with pytest.raises(NoProcessGroupError, match=r"no process group with the ranks \[0, 1, 2\]"):
        group_name("cpu[unseen=3:1]@3", 0, min(rank, 2))


@on_ranks(4)
def test_group_found_by_ranks_keeps_their_order():
    """Collectives count in the order of the group: a group whose order is not that of the mesh would exchange
    shards.
    """
    text = "cpu[gone=4:1]@3.1.0.2"
    assert mesh_text(DeviceMesh("cpu", [3, 1, 0, 2], mesh_dim_names=("gone",))) == text
    gc.collect()
    with pytest.raises(NoProcessGroupError, match=r"\[3, 1, 0, 2\]"):
        group_name(text, 0, dist.get_rank())  # that of torch is in the order of ranks
    mesh_in_its_order("cpu", torch.tensor([3, 1, 0, 2]), ("gone",))
    gc.collect()
    assert gathered(group_name(text, 0, dist.get_rank())).tolist() == [3, 1, 0, 2]


def gathered(name):
    group = group_named(name)
    out = torch.empty(dist.get_world_size(group), dtype=torch.int64)
    dist.all_gather_into_tensor(out, torch.tensor([dist.get_rank()]), group=group)
    return out


def test_where_torch_sorts_the_ranks_of_a_group_those_that_do_not_ascend_are_refused(monkeypatch):
    monkeypatch.setattr(compat_mesh, "_KEEPS_ORDER", False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, group_desc: (ranks, group_desc))
    assert new_group_in_order((0, 2), group_desc="mesh_a") == ([0, 2], "mesh_a")
    with pytest.raises(
        UnsupportedTorchError, match=r"sorts the ranks of a process group, and \[2, 0\] have to stay in their order"
    ):
        new_group_in_order((2, 0), group_desc="mesh_a")
