"""Topologies by name and from files, the links of a mesh, and what a collective over them takes."""

import dataclasses
import json

import pytest
import torch

from dtensor_compile.errors import OptionError, TopologyError
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.options import Options
from dtensor_compile.topology import (
    CLUSTERS,
    LINKS,
    Cluster,
    Link,
    from_values,
    save_topology,
    seconds_over,
    to_values,
    topology,
)
from dtensor_compile.topology.links import compute_seconds
from dtensor_compile.topology.network import PLAIN, Network, current_topology, network_of, plans_for

TOML = """
ranks_per_host = 2
inside = "nvlink4"
[between]
latency = 8e-6
bandwidth = 50e9
shared = true
[mesh_dims.tp]
latency = 1e-6
bandwidth = 1e9
"""


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_preset_survives_a_file(name, tmp_path):
    save_topology(topology(name), tmp_path / "t.json")
    assert topology(tmp_path / "t.json") == CLUSTERS[name] == from_values(to_values(CLUSTERS[name]))


def test_toml(tmp_path):
    (tmp_path / "racks.toml").write_text(TOML)
    racks = topology(str(tmp_path / "racks.toml"))
    assert racks.name == "racks" and racks.inside == LINKS["nvlink4"] and racks.between == Link(8e-6, 50e9, shared=True)
    assert racks.mesh_dims == {"tp": Link(1e-6, 1e9)} and racks.backend == ""
    (tmp_path / "racks.toml").write_text(TOML.replace("1e9", "2e9"))
    assert topology(tmp_path / "racks.toml").mesh_dims["tp"].bandwidth == 2e9


LINK = {"latency": 1, "bandwidth": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inside": LINK}, "of which inside and between are needed; given: inside"),
        ({"inside": LINK, "between": LINK, "ranks": 8}, "given: inside, between, ranks"),
        ({"inside": LINK, "between": "nvlink9"}, "no link is called 'nvlink9'; presets: nvlink2"),
        ({"inside": LINK, "between": {"latency": 1}}, "between: a link is latency"),
        ({"inside": LINK, "between": {**LINK, "bandwidth": 0}}, "between.bandwidth is a number above zero, not 0"),
        ({"inside": LINK, "between": {**LINK, "latency": -1}}, "between.latency is a number not below zero"),
        ({"inside": LINK, "between": {**LINK, "shared": 1}}, "between.shared is true or false"),
        ({"inside": LINK, "between": LINK, "mesh_dims": [1]}, "mesh_dims is a table"),
        ({"inside": LINK, "between": LINK, "ranks_per_host": True}, "ranks_per_host is a number of ranks"),
        ({"inside": LINK, "between": LINK, "device": {"peak": 3}}, "a device is peak"),
    ],
)
def test_bad_values_are_errors_that_name_the_key(values, message):
    with pytest.raises(TopologyError, match=message):
        from_values(values)


def test_bad_names_and_files(tmp_path):
    with pytest.raises(TopologyError, match="'h10' is neither a file nor a preset; did you mean 'h100'"):
        topology("h10")
    (tmp_path / "t.toml").write_text("a = [")
    with pytest.raises(TopologyError, match="does not parse"):
        topology(tmp_path / "t.toml")
    with pytest.raises(TopologyError, match=r"call the file .*t\.json"):
        save_topology(CLUSTERS["h100"], tmp_path / "t.toml")


def test_option(tmp_path):
    assert Options.parse(options={"topology": "h100"}).topology is CLUSTERS["h100"]
    assert Options.parse(options={"topology": CLUSTERS["a100"]}).topology is CLUSTERS["a100"]
    (tmp_path / "t.json").write_text(json.dumps(to_values(CLUSTERS["v100"])))
    assert Options.parse(options={"topology": str(tmp_path / "t.json")}).topology == CLUSTERS["v100"]
    for wrong in ("h10", 3):
        with pytest.raises(OptionError, match="option 'topology'"):
            Options.parse(options={"topology": wrong})


def test_link_of_a_mesh_dim_is_the_slowest_of_its_groups():
    layout = parse_mesh("cuda[dp=2:8,tp=8:1]@16")
    with plans_for(CLUSTERS["h100"]):
        inside, between = LINKS["nvlink4"], LINKS["infiniband-ndr"]
        assert network_of(layout).links == (between.of_group(2, 1, inside), inside.of_group(1, 8))
        assert network_of(layout).backend == "nccl"
        both = network_of(layout).link((0, 1))
        assert (both.hosts, both.per_host, both.bandwidth) == (2, 8, between.bandwidth)
        crooked = parse_mesh("cuda[2:6,6:1]@12")  # the second group of six spans two hosts
        assert [link.hosts for link in network_of(crooked).links] == [2, 2]
    assert current_topology() is None and network_of(layout) == Network() and Network().uniform


@pytest.mark.parametrize(
    "ranks, ranks_per_host, alike",
    [
        ((0, 1), 4, True),
        ((0, 1), 3, False),  # 2 and 3 are on two hosts
        ((0, 2), 4, True),
        ((0, 2), 3, False),
        ((0, 1, 4, 5), 8, False),  # may be
        ((0, 9), 8, True),
        ((0, 1), 0, True),
        ((3,), 3, True),
    ],
)
def test_groups_of_one_shape_that_use_links_alike(ranks, ranks_per_host, alike):
    assert dataclasses.replace(CLUSTERS["h100"], ranks_per_host=ranks_per_host).is_alike(ranks) is alike


def test_shared_link_is_shared_by_the_ranks_of_a_host():
    shared = Link(1.0, 80.0, shared=True)
    cluster = Cluster("c", 4, shared, shared, CLUSTERS["h100"].device, {"tp": shared})
    with plans_for(cluster):
        assert [link.bandwidth for link in network_of(parse_mesh("cpu[dp=4:2,tp=2:1]@8")).links] == [20.0, 20.0]
        assert [link.bandwidth for link in network_of(parse_mesh("cpu[dp=1:2,tp=2:1]@2")).links] == [40.0, 40.0]
    with plans_for(dataclasses.replace(cluster, ranks_per_host=0)):
        assert [link.bandwidth for link in network_of(parse_mesh("cpu[dp=4:2,tp=2:1]@8")).links] == [10.0, 10.0]


def test_dims_together_are_as_slow_as_the_slowest():
    network = Network((Link(1.0, 10.0), Link(3.0, 40.0)))
    assert network.link((0, 1)) == Link(3.0, 10.0) and network.link((1,)) == Link(3.0, 40.0) and not network.uniform
    assert Network().link((0,)) == PLAIN
    assert network.seconds("all_gather", (0, 1), 4, 20) == 2 * 3.0 + 2.0
    assert network.seconds("all_to_all", (1,), 4, 40, messages=1) == 3.0 + 1.0


def test_gloo_sends_a_reduce_scatter_twice():
    link = Link(0.0, 10.0)
    assert seconds_over(link, "gloo", "reduce_scatter", 100, 2) == 20
    assert seconds_over(link, "", "reduce_scatter", 100, 2) == seconds_over(link, "", "all_to_all", 100, 2) == 10
    assert seconds_over(link, "gloo", "reduce_scatter", 100, 1) == 0


@pytest.fixture
def tf32_as_by_default():
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "none"
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision = before


ALLOWED = {
    "legacy": lambda: torch.set_float32_matmul_precision("high"),
    "matmul": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.mark.usefixtures("tf32_as_by_default")
@pytest.mark.parametrize("allow", ALLOWED.values(), ids=ALLOWED)
def test_float32_matmuls_take_longer_where_tf32_is_off(allow):
    # torch.get_float32_matmul_precision raises after the second and the third.
    float32, narrow = (compute_seconds(CLUSTERS["h100"].device, 10**15, 0, itemsize) for itemsize in (4, 2))
    allow()
    assert float32 > 5 * compute_seconds(CLUSTERS["h100"].device, 10**15, 0, 4)
    assert narrow == compute_seconds(CLUSTERS["h100"].device, 10**15, 0, 2)
