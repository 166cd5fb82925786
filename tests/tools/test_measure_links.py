"""What is fitted to times of collectives."""

import pytest

from dtensor_compile.testing import run_on_ranks
from tests.tools import load_tool

measure_links = load_tool("measure_links")


@pytest.mark.parametrize("latency, bandwidth, messages", [(1e-4, 125e6, 1), (5e-6, 5e9, 3)])
def test_latency_and_bandwidth_come_back(latency, bandwidth, messages):
    link = measure_links.fit((1e7, 1e7 / bandwidth), (1e3, messages * latency + 1e3 / bandwidth), messages)
    assert link.latency == pytest.approx(latency) and link.bandwidth == pytest.approx(bandwidth)


def test_a_latency_is_never_below_zero():
    assert measure_links.fit((1e6, 1e-2), (1e3, 1e-6), 1).latency == 0


def measured():
    return measure_links.measure_link(3), measure_links.measure_device(3)


def measured_collectives():
    return measure_links.measure_collectives(1 << 12, 3)


def test_collectives_are_measured_by_size():
    found, other = run_on_ranks(2, measured_collectives)
    assert found == other and [(this.kind, this.ranks) for this in found] == [(kind, 2) for kind in measure_links.KINDS]
    for this in found:
        sizes = [size for size, _ in this.rates.points]
        assert len(sizes) == 2 and sizes[1] == 4 * sizes[0]


def test_all_ranks_measure_the_same():
    (link, device), other = run_on_ranks(2, measured)
    assert (link, device) == other and link.bandwidth > 0 and device.memory > 0
    assert all(rate > 0 for _, rate in device.peak) and 0 <= device.contention < 1
