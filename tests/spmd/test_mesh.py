"""Meshes, partition specs, and what they mean device by device."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.errors import MeshError, PlacementError
from dtensor_compile.ir.spec import parse_spec, spec_text
from dtensor_compile.spmd import (
    Mesh,
    ShardingType,
    get_1d_mesh,
    get_global_mesh,
    set_global_mesh,
    wrap_as_sharded_tensor,
)
from dtensor_compile.spmd.op_sharding import grid_of
from dtensor_compile.spmd.partition_spec import axes_to_placements, placements_to_axes
from dtensor_compile.testing import make_mesh, on_ranks
from tests.spmd.tables import TABLES, as_spec, needs_tables

MESHES = [(4,), (1,), (6,), (2, 2), (1, 3), (4, 2), (2, 2, 2), (2, 3, 2), (1, 2, 2), (2, 1, 3), (4, 2, 2)]


def every_spec(axes, ndim):
    """Every way to cut `ndim` dims with some of the axes, each at most once, in every order."""
    for count in range(axes + 1):
        for chosen in itertools.permutations(range(axes), count):
            for dims in itertools.combinations_with_replacement(range(ndim), count):
                spec = [[] for _ in range(ndim)]
                for axis, dim in zip(chosen, dims):
                    spec[dim].append(axis)
                yield tuple(tuple(entry) if len(entry) > 1 else entry[0] if entry else None for entry in spec)


def entries(spec):
    return [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]


# ---- the tables ----------------------------------------------------------------------------------------------------


@needs_tables
def test_every_row_of_the_table_agrees():
    assert len(TABLES["op_sharding_args"]) > 300
    for row in TABLES["op_sharding_args"]:
        got = Mesh(row["device_ids"], row["mesh_shape"]).op_sharding(as_spec(row["partition_spec"]))
        for key in ("tile_assignment", "group_assignment", "replication_groups", "sharding_type"):
            assert getattr(got, key) == row[key], (key, row)
        assert (dataclasses.asdict(got.v2) if got.v2 else None) == row["v2"], row


@needs_tables
def test_every_column_of_the_tables_is_compared():
    """A row or a column that is new in the tables fails here, until a test of this file or of test_hybrid_mesh.py
    compares it.
    """
    spec = {"mesh_shape", "device_ids", "partition_spec"}
    of_test, of_spec = {"test", "n_devices"}, {"partition_spec", "mesh_shape", "tensor_shape"}
    results = {"tile_assignment", "group_assignment", "replication_groups", "sharding_type", "v2"}
    layout = {"ici_mesh_shape", "dcn_mesh_shape", "device_attributes"}
    check = {
        "test",
        "n",
        "device_ids",
        "mesh_shape",
        "raises",
        "match",
        "size",
        "axis_names",
        "shape",
        "logical_mesh_shape",
    }
    known = {
        "A_tile_assignment": of_test | of_spec | {"device_ids", "axis_names", "expect"},
        "B_local_shards": of_test | of_spec | {"local_shape", "shards"},
        "C_hybrid_mesh": layout | {"test", "expect_logical_mesh"},
        "D_redistribute": of_test | of_spec | {"placements", "expect_partition_spec", "expect_hlo_contains"},
        "D_redistribute_errors": {"test", "tensor_shape", "mesh_shape", "placements", "raises"},
        "E_mesh_validation": check | {"device_mesh", "xla_mesh_shape", "xla_device_ids"},
        "F_sharding_string_to_grid": {"test", "hlo", "grid"},
    }
    rows = {name: rows for name, rows in TABLES["stated"].items() if isinstance(rows, list)}
    assert {name: set().union(*rows[name]) for name in rows} == known
    assert set().union(*TABLES["op_sharding_args"]) == spec | results
    assert set().union(*TABLES["hybrid_mesh"]) == layout | {"label", "logical_mesh"}
    assert TABLES.keys() == {"stated", "op_sharding_args", "hybrid_mesh"}


@needs_tables
def test_stated_tile_assignments():
    for row in TABLES["stated"]["A_tile_assignment"]:
        mesh = Mesh(row["device_ids"], row["mesh_shape"], row["axis_names"])
        assert str(mesh.op_sharding(as_spec(row["partition_spec"]))) == row["expect"]["hlo"], row


@needs_tables
def test_stated_local_shards():
    for row in TABLES["stated"]["B_local_shards"]:
        mesh, shape = Mesh(range(row["n_devices"]), row["mesh_shape"]), row["tensor_shape"]
        got = mesh.device_shards(as_spec(row["partition_spec"]), shape)
        assert list(got[0].shape) == row["local_shape"]
        whole = [[0, size] for size in shape]
        for shard, want in zip(got, row.get("shards", [])):
            index = whole if want["index"] == "all" else want["index"]
            assert (shard.device, list(map(list, shard.index)), shard.replica) == (
                want["device"],
                index,
                want["replica_id"],
            ), row


@needs_tables
def test_stated_placements():
    for row in TABLES["stated"]["D_redistribute"]:
        axes = placements_to_axes(parse_spec("".join(row["placements"])), row["mesh_shape"], len(row["tensor_shape"]))
        spec = as_spec(row["expect_partition_spec"])
        assert axes == tuple(map(tuple, entries(spec))), row
        if (
            len(row["mesh_shape"]) == 1 or row["n_devices"] == 4
        ):  # over two axes stated for four devices alone, as the note says
            assert row["expect_hlo_contains"] in str(
                Mesh(range(row["n_devices"]), row["mesh_shape"]).op_sharding(spec)
            ), row
    for row in TABLES["stated"]["D_redistribute_errors"]:
        texts = [text.replace("P", "P(sum)") for text in row["placements"]]
        with pytest.raises(PlacementError):
            placements_to_axes(parse_spec("".join(texts)), (4,), len(row["tensor_shape"]))


@needs_tables
def test_stated_rules_of_meshes():
    for row in TABLES["stated"]["E_mesh_validation"]:
        with simulated_job(row["n"], 0):
            if "raises" in row:
                says = {
                    "Device IDs must be unique": "unique",
                    "Device IDs must be less than mesh size": "have to be 0..",
                }
                with pytest.raises(MeshError, match=says.get(row["match"], "places|the job has 4 ranks")):
                    Mesh(row["device_ids"], row["mesh_shape"])
            elif "device_mesh" in row:
                mesh = Mesh.from_device_mesh(DeviceMesh("cpu", row["device_mesh"]))
                assert list(mesh.mesh_shape) == row["xla_mesh_shape"] and list(mesh.device_ids) == row["xla_device_ids"]
            else:
                mesh = Mesh(row["device_ids"], row["mesh_shape"], row.get("axis_names"))
                assert mesh.size() == row.get("size", 4)
                assert list(mesh.shape().items()) == [tuple(pair) for pair in row.get("shape", mesh.shape().items())]
                assert list(mesh.get_logical_mesh().shape) == row.get("logical_mesh_shape", row["mesh_shape"])


@needs_tables
def test_stated_grids():
    for row in TABLES["stated"]["F_sharding_string_to_grid"]:
        assert grid_of(row["hlo"]) == row["grid"]


# ---- a model of it in numpy ----------------------------------------------------------------------------------------


def tile_of(grid, spec, coordinate):
    """Which tile a device holds, dim by dim: the number that the coordinates of its axes spell, the first axis counting
    most.
    """
    tile = []
    for entry in entries(spec):
        number = 0
        for axis in entry:
            number = number * grid.shape[axis] + coordinate[axis]
        tile.append(number)
    return tuple(tile)


@pytest.mark.parametrize("shape", MESHES)
def test_every_spec_agrees_with_the_model(shape):
    n = math.prod(shape)
    for ids in (range(n), np.random.RandomState(0).permutation(n)):
        mesh = Mesh(ids, shape)
        grid = mesh.get_logical_mesh()
        for spec in itertools.chain.from_iterable(every_spec(len(shape), ndim) for ndim in (1, 2, 3)):
            got = mesh.op_sharding(spec)
            holders = {}
            for coordinate in np.ndindex(*shape):
                holders.setdefault(tile_of(grid, spec, coordinate), []).append(int(grid[coordinate]))
            if got.sharding_type == ShardingType.REPLICATED:
                assert n == 1 or set(spec) == {None}
                continue
            rows = got.replication_groups or np.array(got.tile_assignment).reshape(len(holders), -1).tolist()
            tiles = list(np.ndindex(*got.tile_dims))
            assert [sorted(row) for row in rows] == [sorted(holders[tile]) for tile in tiles], (shape, spec)
            assert (got.sharding_type == ShardingType.TILED) == (not got.replication_groups)
            if got.group_assignment:
                numbers = np.array(got.group_assignment)
                assert all(int(numbers[tile]) == i for i, tile in enumerate(tiles))


@pytest.mark.parametrize("ndim", (1, 2, 3))
@pytest.mark.parametrize("shape", MESHES)
def test_every_pair_of_specs_shares_what_the_model_says(shape, ndim):
    """For every pair of specs and of devices: how much of what one device holds under the one spec another holds under
    the other.
    """
    n = math.prod(shape)
    mesh = Mesh(np.random.RandomState(1).permutation(n), shape)
    grid, size, specs = mesh.get_logical_mesh(), [n] * ndim, list(every_spec(len(shape), ndim))
    held, ranges = np.zeros((len(specs), n, *size), np.float32), np.zeros((len(specs), n, ndim, 2), int)
    for spec, masks, found in zip(specs, held, ranges):
        pieces = [math.prod(shape[a] for a in entry) for entry in entries(spec)]
        for coordinate in np.ndindex(*shape):
            tile = tile_of(grid, spec, coordinate)
            masks[grid[coordinate]][
                tuple(slice(t * s // p, (t + 1) * s // p) for t, s, p in zip(tile, size, pieces))
            ] = 1
        for shard in mesh.device_shards(spec, size):
            found[shard.device] = shard.index
    cells, (begin, end) = held.reshape(len(specs) * n, -1), np.moveaxis(ranges.reshape(len(specs) * n, ndim, 2), -1, 0)
    common = np.ones((len(cells), len(cells)), int)
    for low, high in zip(begin.T, end.T):
        common *= (np.minimum(high[:, None], high) - np.maximum(low[:, None], low)).clip(0)
    assert np.array_equal(common, cells @ cells.T), shape


@pytest.mark.parametrize("shape", MESHES)
def test_placements_there_and_back(shape):
    for spec in every_spec(len(shape), 2):
        # An axis of size 1 cuts nothing: where it stands in the order, placements do not say.
        axes = tuple(tuple(a for a in entry if shape[a] > 1) for entry in entries(spec))
        placements = axes_to_placements(axes, shape)
        assert placements_to_axes(placements, shape, 2) == axes, (spec, placements)


def test_order_of_axes_is_a_strided_shard():
    mesh = Mesh(range(8), (2, 4), ("dp", "tp"))
    text = {spec: spec_text(axes_to_placements(mesh.axes(spec), mesh.mesh_shape)) for spec in [
        (("dp", "tp"),), (("tp", "dp"),), ("tp", "dp"), (None, "tp"), (None, None)]}  # fmt: skip
    assert list(text.values()) == ["S(0)S(0)", "_S(0,4)S(0)", "S(1)S(0)", "RS(1)", "RR"]


# ---- rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, says",
    [
        ("dp", "one entry per tensor dim"),
        ((("dp", ("tp",)), None), "nests too deep"),
        (("dp", "dp"), "'dp' twice"),
        (((0, 1), 1), "'tp' twice"),
        (("ep", None), "unknown mesh axis 'ep'; the axes are 'dp', 'tp'"),
        ((2, None), "axes 0 to 1"),
        ((-1, None), "axes 0 to 1"),
        ((True, None), "an entry is None"),
        ((1.5, None), "an entry is None"),
        (((), None), "empty entry"),
    ],
)
def test_rule_of_specs(spec, says):
    with pytest.raises(PlacementError, match=says):
        Mesh(range(4), (2, 2), ("dp", "tp")).op_sharding(spec)


def test_rank_of_spec_and_tensor():
    with pytest.raises(PlacementError, match="1 entries, the tensor has 2 dims"):
        Mesh(range(4), (2, 2)).device_shards((0,), (4, 4))


@pytest.mark.parametrize(
    "arguments, says",
    [
        ((range(4), (2, 4)), "8 places"),
        (([0, 0, 1, 1], (4,)), "unique"),
        (([4, 5, 6, 7], (4,)), "0..3"),
        ((range(4), (2, 2), ("a",)), "1 axis names"),
        ((range(4), (2, 2), ("a", "a")), "unique"),
        (([], (0,)), "at least 1"),
    ],
)
def test_rule_of_meshes(arguments, says):
    with pytest.raises(MeshError, match=says):
        Mesh(*arguments)


@pytest.mark.parametrize(
    "placements, says",
    [
        ((Shard(2),), "does not have"),
        ((Shard(0), Shard(1)), "do not fit"),
        ((Partial(),), "reduce it first"),
    ],
)
def test_rule_of_placements(placements, says):
    with pytest.raises(PlacementError, match=says):
        placements_to_axes(placements, (4,), 2)


def test_scalar_has_an_empty_spec():
    assert Mesh(range(1), (1,)).op_sharding(()).sharding_type == ShardingType.REPLICATED
    assert axes_to_placements((), (2, 2)) == (Replicate(), Replicate())


def test_text_that_is_no_grid():
    for text in ("{replicated}", "{devices=[2,2]0,1,2}"):
        with pytest.raises(PlacementError, match="looks like"):
            grid_of(text)


def test_global_mesh():
    mesh = get_1d_mesh("data", size=4)
    set_global_mesh(mesh)
    assert get_global_mesh() is mesh and mesh.axis_names == ("data",) and mesh.get_axis_name_idx("data") == 0
    assert mesh.get_axis_name_idx("x") is None
    set_global_mesh(None)


@pytest.mark.parametrize("rank", range(6))
def test_uneven_shards_are_those_of_dtensor(rank):
    with simulated_job(6, rank):
        for shape in ((6,), (3, 2), (2, 3), (1, 6)):
            mesh = Mesh(range(6), shape)
            for spec, length in itertools.product(every_spec(len(shape), 1), range(8)):
                t = torch.arange(float(length))
                ((begin, end),) = mesh.device_shards(spec, (length,))[rank].index
                assert wrap_as_sharded_tensor(t, mesh, spec).to_local().tolist() == t[begin:end].tolist(), (
                    shape,
                    spec,
                    length,
                )


# ---- on ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(4)
def test_device_mesh_there_and_back():
    device_mesh = make_mesh((2, 2), ("dp", "tp"))
    mesh = Mesh.from_device_mesh(device_mesh)
    assert mesh == Mesh(range(4), (2, 2), ("dp", "tp")) and mesh.to_device_mesh() is device_mesh
    other = Mesh(range(4), (4, 1)).to_device_mesh()
    assert other.shape == (4, 1) and torch.equal(other.mesh.flatten(), torch.arange(4))
    assert Mesh([0, 2, 1, 3], (2, 2)).to_device_mesh().mesh.tolist() == [[0, 2], [1, 3]]
    with pytest.raises(MeshError, match="2 devices, the job has 4 ranks"):
        Mesh(range(2), (2,))
    assert get_1d_mesh().size() == 4
