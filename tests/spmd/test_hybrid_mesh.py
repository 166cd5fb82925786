"""Logical axes onto networks: the tables, the rules, the choice explained."""

import io
import itertools
import math
import os

import numpy as np
import pytest
import torch.distributed as dist
from rich.console import Console

from dtensor_compile.errors import MeshError
from dtensor_compile.spmd.hybrid_mesh import HybridMesh
from dtensor_compile.testing import on_ranks
from dtensor_compile.topology.devices import hosts_from_environment, nvlink_devices, nvlink_domains
from dtensor_compile.topology.links import CLUSTERS, collective_seconds
from dtensor_compile.topology.torus import assign_axes, lay_out
from tests.spmd.tables import TABLES, needs_tables


def torus(*shape, slices=1, start=0):
    places = list(itertools.product(range(slices), *(range(size) for size in reversed(shape))))
    return [
        {"coords": list(reversed(place[1:])), "core_on_chip": 0, "slice_index": place[0], "name": f"TPU:{i + start}"}
        for i, place in enumerate(places)
    ]


@needs_tables
def test_every_row_of_the_table_agrees():
    rows = TABLES["hybrid_mesh"] + [
        {**r, "logical_mesh": r["expect_logical_mesh"]} for r in TABLES["stated"]["C_hybrid_mesh"]
    ]
    assert len(rows) > 8
    for row in rows:
        shapes = {key: row[key] for key in ("ici_mesh_shape", "dcn_mesh_shape", "device_attributes")}
        whole = row["ici_mesh_shape"] != [2, 2, 4]  # 4x4 devices: two of the axes share y
        if not whole:
            with pytest.raises(MeshError, match="allow_split_physical_axes"):
                HybridMesh(**shapes)
        mesh = HybridMesh(**shapes, allow_split_physical_axes=not whole)
        assert mesh.get_logical_mesh().tolist() == row["logical_mesh"], row


def test_two_axes_before_one_and_equal_ones_before_others():
    assert assign_axes((4, 4, 16), (16, 16)) == ((1, 1, 16), (4, 4, 1))
    assert assign_axes((2, 8, 4, 4), (16, 16)) == ((2, 8, 1, 1), (1, 1, 4, 4))
    assert assign_axes((4, 2, 2), (4, 4)) == ((4, 1, 1), (1, 2, 2))
    assert assign_axes((2, 2, 1), (1, 4)) == ((1, 1, 1), (2, 2, 1))


def test_a_choice_that_leaves_no_fit_is_taken_back():
    # Two axes (2, 6) would suit the last mesh axis better than 12 alone, but then 6 has no axis.
    assert assign_axes((2, 6, 12), (6, 2, 12)) == ((1, 6, 1), (2, 1, 1), (1, 1, 12))
    assert assign_axes((2, 3, 6), (6, 6)) in (((1, 1, 6), (2, 3, 1)), ((2, 3, 1), (1, 1, 6)))


@pytest.mark.parametrize("shape, mesh", [((4, 4), (2, 8)), ((8,), (2, 4)), ((6, 4), (8, 3)), ((4, 4, 2), (2, 2, 2, 4))])
def test_split_axes_keep_every_device_once_and_neighbours_near(shape, mesh):
    with pytest.raises(MeshError, match="allow_split"):
        assign_axes(shape, mesh)
    devices = np.arange(math.prod(shape)).reshape(shape)
    out = lay_out(devices, assign_axes(shape, mesh, split=True))
    assert out.shape == mesh and sorted(out.flatten()) == list(range(math.prod(shape)))


#: What torch_xla assigns to each mesh axis of the axes of a torus that no layout leaves whole.
SPLIT = [
    ((4, 4, 1), (2, 8), ((1, 2, 1), (4, 2, 1))),
    ((4, 4, 1), (8, 2), ((2, 4, 1), (2, 1, 1))),
    ((4, 4, 1), (2, 2, 4), ((1, 2, 1), (1, 2, 1), (4, 1, 1))),
    ((4, 4, 4), (2, 32), ((1, 1, 2), (4, 4, 2))),
    ((4, 4, 4), (8, 8), ((1, 2, 4), (4, 2, 1))),
    ((4, 4, 4), (2, 8, 4), ((1, 1, 2), (1, 4, 2), (4, 1, 1))),
    ((4, 4, 4), (8, 4, 2), ((2, 1, 4), (1, 4, 1), (2, 1, 1))),
    ((6, 4, 1), (8, 3), ((2, 4, 1), (3, 1, 1))),
    ((2, 6, 3), (3, 12), ((1, 1, 3), (2, 6, 1))),
    ((2, 6, 3), (4, 9), ((2, 2, 1), (1, 3, 3))),
    ((8, 1, 1), (2, 4), ((2, 1, 1), (4, 1, 1))),
]


@pytest.mark.parametrize("shape, mesh, assignment", SPLIT)
def test_split_axes_have_the_order_of_torch_xla(shape, mesh, assignment):
    assert assign_axes(shape, mesh, split=True) == assignment


def test_the_devices_of_split_axes():
    grid = HybridMesh(
        ici_mesh_shape=(2, 8), device_attributes=torus(4, 4, 1), allow_split_physical_axes=True
    ).get_logical_mesh()
    assert grid.tolist() == [[0, 4, 1, 5, 2, 6, 3, 7], [8, 12, 9, 13, 10, 14, 11, 15]]
    mesh = HybridMesh(
        ici_mesh_shape=(2, 8),
        dcn_mesh_shape=(2, 1),
        device_attributes=torus(4, 4, 1, slices=2),
        allow_split_physical_axes=True,
    )
    assert mesh.get_logical_mesh().tolist() == [*grid.tolist(), *(grid + 16).tolist()]


def test_nothing_is_split_without_need():
    for shape, mesh in (((4, 2, 2), (2, 2, 4)), ((2, 4, 8), (2, 4, 8)), ((2, 3, 6), (6, 6))):
        assert assign_axes(shape, mesh, split=True) == assign_axes(shape, mesh)


def test_a_mesh_of_256_devices_follows_the_torus():
    devices = torus(4, 4, 16)
    mesh = HybridMesh(ici_mesh_shape=(16, 16), device_attributes=devices)
    grid, place = mesh.get_logical_mesh(), {int(d["name"][4:]): d["coords"] for d in devices}
    assert {place[i][2] for i in grid[5]} == {5} and {tuple(place[i][:2]) for i in grid[:, 7]} == {(1, 3)}


def test_granules_are_outer_and_in_order():
    hosts = [{"name": str(r), "slice_index": 1 - r // 4} for r in range(8)]
    mesh = HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(1, 2), axis_names=("dp", "tp"), device_attributes=hosts)
    assert mesh.get_logical_mesh().tolist() == [[4, 5, 0, 1], [6, 7, 2, 3]]


HOST_NUMBERS = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID", "RANK")


def slices(devices):
    return [device["slice_index"] for device in devices]


def test_hosts_from_the_environment(monkeypatch):
    for name in HOST_NUMBERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [d["slice_index"] for d in hosts_from_environment()] == [0] * 4 + [1] * 4
    mesh = HybridMesh(ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 1), axis_names=("dp", "tp"))
    assert mesh.get_logical_mesh().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(MeshError, match="do not divide"):
        hosts_from_environment()
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(MeshError, match="torchrun"):
        hosts_from_environment()


TOPOLOGY = """
        GPU0    GPU1    GPU2    GPU3    NIC0    CPU Affinity
GPU0     X      NV18    SYS     SYS     PIX     0-31
GPU1    NV18     X      SYS     SYS     SYS     0-31
GPU2    SYS     SYS      X      NV18    SYS     32-63
GPU3    SYS     SYS     NV18     X      SYS     32-63
NIC0    PIX     SYS     SYS     SYS      X

Legend:
  X    = Self
"""


def test_nvlink_domains():
    assert nvlink_domains(TOPOLOGY) == [[0, 1], [2, 3]]
    assert nvlink_domains(TOPOLOGY.replace("SYS", "NV4")) == [[0, 1, 2, 3]]
    assert nvlink_domains("\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tPHB\nGPU1\tPHB\t X") == [[0], [1]]


def test_nvlink_domains_of_all_hosts_are_granules():
    hosts = [{"name": str(rank), "slice_index": rank // 4} for rank in range(8)]
    devices = nvlink_devices(TOPOLOGY, hosts)
    assert slices(devices) == [0, 0, 1, 1, 2, 2, 3, 3]
    mesh = HybridMesh(ici_mesh_shape=(1, 2), dcn_mesh_shape=(4, 1), axis_names=("dp", "tp"), device_attributes=devices)
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    turns = [{"name": str(rank), "slice_index": rank % 2} for rank in range(8)]  # ranks dealt out to the hosts in turn
    assert slices(nvlink_devices(TOPOLOGY, turns)) == [0, 2, 0, 2, 1, 3, 1, 3]
    with pytest.raises(MeshError, match="host 0 has 4 GPUs, and rank 4 would use its GPU 4"):
        nvlink_devices(TOPOLOGY, [{"name": str(rank), "slice_index": 0} for rank in range(5)])


@pytest.mark.parametrize("name", HOST_NUMBERS[:3])
def test_a_rank_on_another_host_than_its_number_says(name, monkeypatch):
    for other in HOST_NUMBERS:
        monkeypatch.delenv(other, raising=False)
    for key, value in {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5", name: "1"}.items():
        monkeypatch.setenv(key, value)
    assert slices(hosts_from_environment()) == [0] * 4 + [1] * 4
    monkeypatch.setenv(name, "0")
    with pytest.raises(MeshError, match="rank 5 is on host 0, so that ranks are not numbered host by host"):
        hosts_from_environment()


@on_ranks(4)
def test_ranks_tell_each_other_their_hosts():
    rank = dist.get_rank()
    os.environ["GROUP_RANK"] = str(rank % 2)
    try:
        assert slices(hosts_from_environment()) == [0, 1, 0, 1]
        mesh = HybridMesh(ici_mesh_shape=(1, 2), dcn_mesh_shape=(2, 1), axis_names=("dp", "tp"))
        assert mesh.get_logical_mesh().tolist() == [[0, 2], [1, 3]]
        if rank == 3:
            del os.environ["GROUP_RANK"]  # one that does not know: ranks in a row, on every rank
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        assert slices(hosts_from_environment()) == [0, 0, 1, 1]
        assert slices(nvlink_devices(TOPOLOGY if rank < 2 else TOPOLOGY.replace("NV18", "SYS"))) == [0, 0, 1, 2]
    finally:
        os.environ.pop("GROUP_RANK", None)
        os.environ["LOCAL_WORLD_SIZE"] = "4"


def test_nvlink_without_the_tool(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MeshError, match="no nvidia-smi"):
        nvlink_domains()


def test_nvidia_smi_is_called(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n[ \"$1 $2\" = 'topo -m' ] && echo '{TOPOLOGY}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert nvlink_domains() == [[0, 1], [2, 3]]
    tool.write_text("#!/bin/sh\necho 'no driver' >&2; exit 9\n")
    with pytest.raises(MeshError, match="failed: no driver"):
        nvlink_domains()


def test_the_choice_is_explained():
    mesh = HybridMesh(
        ici_mesh_shape=(2, 8),
        dcn_mesh_shape=(2, 1),
        axis_names=("dp", "tp"),
        device_attributes=torus(4, 2, 2, slices=2),
    )
    out = io.StringIO()
    Console(file=out, width=120).print(mesh.explain())
    rows = [[cell.strip() for cell in line.split("│")] for line in out.getvalue().splitlines() if "us" in line]
    assert rows[0][1:6] == ["dp", "4", "2", "z (2)", "2"] and rows[1][1:6] == ["tp", "8", "8", "x (4), y (2)", "1"]
    size, h100 = 64 << 20, CLUSTERS["h100"]  # an all-reduce sends 2 (n - 1) / n of it
    assert mesh.all_reduce_seconds(1, size) == collective_seconds(h100, "all_reduce", size * 7 // 4, range(8))
    apart = collective_seconds(h100, "all_reduce", size // 2, (0, 8))  # of half of it, one rank on each host
    assert mesh.all_reduce_seconds(0, size) == collective_seconds(h100, "all_reduce", size, (0, 1)) + apart


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"ici_mesh_shape": (2, 2), "dcn_mesh_shape": (2,)}, "differ in length"),
        ({"ici_mesh_shape": (2, 2), "dcn_mesh_shape": (2, 1)}, "counts 2 granules, there are 1"),
        ({"ici_mesh_shape": (2, 4)}, "has 8 devices, a granule has 4"),
        ({"ici_mesh_shape": (4,), "device_attributes": []}, "needs devices"),
        ({"ici_mesh_shape": (4,), "cluster": "x"}, "unknown cluster"),
        ({"ici_mesh_shape": (4,), "axis_names": ("a", "b")}, "axis names"),
        ({"ici_mesh_shape": (3,), "device_attributes": torus(2, 2)[:3]}, "do not fill"),
        ({"ici_mesh_shape": (2,), "device_attributes": torus(1) * 2}, "same coordinates"),
        ({"ici_mesh_shape": (2,), "device_attributes": [*torus(1), {"name": "1"}]}, "others do not"),
        ({"ici_mesh_shape": (1,), "device_attributes": [{"name": "x"}]}, "must end in its number"),
        ({"ici_mesh_shape": (2,), "dcn_mesh_shape": (2,), "device_attributes": torus(2, slices=2)[:3]}, "equal size"),
    ],
)
def test_rule(arguments, says):
    with pytest.raises(MeshError, match=says):
        HybridMesh(**{"device_attributes": torus(2, 2), **arguments})
