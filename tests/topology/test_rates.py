"""Rates by size, and what is estimated with them."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor_compile.errors import TopologyError
from dtensor_compile.topology import compute_seconds
from dtensor_compile.topology.files import device_values, find_gpu, from_values, save_topology, to_values, topology
from dtensor_compile.topology.gpus import GPUS
from dtensor_compile.topology.links import CLUSTERS, Link, seconds_over, slowest
from dtensor_compile.topology.measured_rates import H100
from dtensor_compile.topology.published_rates import Measured
from dtensor_compile.topology.rates import ATTENTION, ATTENTION_BACKWARD, UNMASKED, Curve, curve

STEEP = Curve(((10.0, 1.0), (1000.0, 10.0), (10000.0, 10.0)))


def test_points_and_what_is_between():
    assert [STEEP.rate(size) for size in (10, 100, 1000, 5000, 1e9)] == pytest.approx([1, 10**0.5, 10, 10, 10])
    assert STEEP.rate(1) == pytest.approx(10**-0.5)  # the first line goes on
    assert STEEP.seconds(0) == 0 and STEEP.times(2).rate(1000) == pytest.approx(20)


def test_less_work_never_takes_longer_below_the_smallest_point():
    launch = Curve(((100.0, 1.0), (200.0, 4.0)))  # a rate that grows faster than the size
    assert launch.seconds(10) == pytest.approx(launch.seconds(100))


def test_points_of_one_size_are_averaged():
    assert curve([(5, 9.0), (4, 5.0), (5, 4.0)]).points == ((4, 5.0), (5, pytest.approx(6.0)))


def test_a_point_that_took_longer_than_a_larger_one_is_noise():
    assert curve([(1, 0.5), (2, 2.0), (3, 3.0)]).points == ((1, 1.0), (2, 2.0), (3, 3.0))


@pytest.mark.parametrize("known", [H100.memory, *H100.matmul.values()], ids=str)
@given(sizes=st.tuples(st.floats(1, 1e13), st.floats(1, 1e13)))
def test_more_work_never_takes_less(known, sizes):
    small, large = sorted(sizes)
    assert known.seconds(small) <= known.seconds(large) * (1 + 1e-9)


def test_attention_without_a_mask_does_twice_the_work():
    assert H100.compute_seconds(1e12, 2, False, ATTENTION + UNMASKED) == pytest.approx(
        H100.compute_seconds(2e12, 2, False, ATTENTION)
    )
    backward = H100.compute_seconds(1e12, 2, False, ATTENTION_BACKWARD)
    assert backward > H100.compute_seconds(1e12, 2, False, ATTENTION)
    assert H100.compute_seconds(1e12, 8, False) is None


def test_estimates_use_them_and_other_devices_are_in_proportion():
    h100, b200 = GPUS["h100"].device, GPUS["b200"].device
    assert compute_seconds(h100, 10**12, 0, 2) == 1e12 / H100.matmul["bfloat16"].rate(1e12)
    assert compute_seconds(h100, 0, 2**31, 2) / compute_seconds(b200, 0, 2**31, 2) == pytest.approx(8 / 3.35)
    assert compute_seconds(h100, 0, 1024, 2) > 10 * compute_seconds(h100, 0, 1024, 2, fused=True)
    assert (h100.quality, b200.quality) == ("measured", "guess") and "H100" in h100.basis
    assert GPUS["h200"].device.quality == "measured" and "H200" in GPUS["h200"].device.basis
    assert compute_seconds(h100, 10**12, 0, 8) == 1e12 / 67e12  # nothing was measured for float64


def test_a_gpus_file_keeps_them(tmp_path):
    known = GPUS["h100"]
    capability = ".".join(map(str, known.capability))
    sizes = {name: getattr(known, name) for name in ("name", "multiprocessors", "bytes", "shared_memory", "l2")}
    values = {**sizes, "capability": capability, "device": device_values(known.device)}
    (tmp_path / "gpu.json").write_text(json.dumps(values))
    assert find_gpu(tmp_path / "gpu.json") == known


MEASURED = Link(1.0, 100.0, shared=True, collectives=(Measured("all_gather", 4, Curve(((10.0, 5.0), (1000.0, 50.0)))),))


def test_a_measured_collective_takes_what_it_took():
    assert seconds_over(MEASURED, "", "all_gather", 10, 4) == pytest.approx(2)
    assert seconds_over(MEASURED, "", "all_gather", 1000, 4) == pytest.approx(20)
    plain = dataclasses.replace(MEASURED, collectives=())
    for kind, n, messages in (("all_reduce", 4, None), ("all_gather", 4, 7)):  # not measured; not the textbook's
        both = [seconds_over(link, "", kind, 1000, n, messages) for link in (MEASURED, plain)]
        assert both[0] == both[1]


def test_other_numbers_of_ranks_differ_as_the_formula_does():
    plain = dataclasses.replace(MEASURED, collectives=())
    factor = seconds_over(MEASURED, "", "all_gather", 1000, 4) / seconds_over(plain, "", "all_gather", 1000, 4)
    assert seconds_over(MEASURED, "", "all_gather", 1000, 16) == pytest.approx(
        factor * seconds_over(plain, "", "all_gather", 1000, 16)
    )
    assert slowest([MEASURED, Link(2.0, 200.0)]).collectives == MEASURED.collectives


def test_ranks_beside_the_measured_group_take_their_share():
    """The measured four shared the link among themselves already."""
    alone, beside = MEASURED.share(4), MEASURED.share(8)
    assert seconds_over(alone, "", "all_gather", 1000, 4) == pytest.approx(20)
    assert seconds_over(beside, "", "all_gather", 1000, 4) == pytest.approx(40)


@pytest.mark.parametrize("n", [2, 4, 6, 8, 16])
def test_a_measured_link_without_latency(n):
    """Its fit may have none, and what is measured says what small collectives take."""
    rates = MEASURED.collectives[0].rates
    link = Link(0.0, 100.0, collectives=tuple(Measured("all_gather", ranks, rates) for ranks in (4, 8)))
    assert seconds_over(link, "", "all_gather", 0, n) == 0
    times = [seconds_over(link, "", "all_gather", size, n) for size in (1, 10, 1000, 5000)]
    assert times == sorted(times) and times[0] > 0


def test_a_topologys_file_keeps_them(tmp_path):
    known = dataclasses.replace(CLUSTERS["cpu-loopback"], between=MEASURED)
    save_topology(known, tmp_path / "t.json")
    assert topology(tmp_path / "t.json") == known


@pytest.mark.parametrize(
    "collectives, message",
    [
        ([], "table by kind"),
        ({"all_gather": []}, "table by kind"),
        ({"gather": {"2": [[1, 1]]}}, "no collective is called 'gather'"),
        ({"all_gather": {"1": [[1, 1]]}}, "'1' is no number of ranks"),
        ({"all_gather": {"2": []}}, "is a list of pairs"),
        ({"all_gather": {"8/3": [[1, 1]]}}, "'8/3' is no number of ranks, nor one of ranks/hosts"),
        ({"all_gather": {"8/0": [[1, 1]]}}, "'8/0' is no number of ranks"),
    ],
)
def test_collectives_that_are_none(collectives, message):
    values = to_values(CLUSTERS["cpu-loopback"])
    values["inside"]["collectives"] = collectives
    with pytest.raises(TopologyError, match=message):
        from_values(values)


def test_a_file_keeps_the_contention_of_a_device(tmp_path):
    known = CLUSTERS["h100"]
    assert known.device.contention > 0
    save_topology(known, tmp_path / "t.json")
    assert topology(tmp_path / "t.json") == known
    values = to_values(known)
    values["device"]["contention"] = 1.0
    with pytest.raises(TopologyError, match="compute goes on beside communication only below 1"):
        from_values(values)


@pytest.mark.parametrize(
    "achieved, message",
    [
        ([], "has the keys memory and matmul"),
        ({"memory": [[1, 1]]}, "has the keys memory and matmul"),
        ({"memory": [[1, 1]], "matmul": {"int8": [[1, 1]]}}, "matmul is a table by dtype"),
        ({"memory": [[1, 1]], "matmul": [[1, 1]]}, "matmul is a table by dtype"),
        ({"memory": [], "matmul": {}}, "memory is a list of pairs"),
        ({"memory": [[1, 2, 3]], "matmul": {}}, "memory is a list of pairs"),
        ({"memory": [[1, 0]], "matmul": {}}, "above zero"),
        ({"memory": [[2, 1], [1, 1]], "matmul": {}}, "sizes grow"),
        ({"memory": [[1, 1]], "matmul": {}, "quality": "good"}, "quality is measured or guess, not 'good'"),
    ],
)
def test_a_table_that_is_none(achieved, message):
    values = to_values(dataclasses.replace(CLUSTERS["cpu-loopback"]))
    values["device"]["achieved"] = achieved
    with pytest.raises(TopologyError, match=message):
        from_values(values)


def test_tf32_is_a_rate_of_its_own():
    before = torch.backends.cuda.matmul.fp32_precision
    device = GPUS["h100"].device
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        fast = compute_seconds(device, 10**12, 0, 4)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert compute_seconds(device, 10**12, 0, 4) > 5 * fast
