"""What is fitted to times of collectives."""

import importlib.util
import pathlib

import pytest

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "measure_links.py"
spec = importlib.util.spec_from_file_location("measure_links", TOOL)
measure_links = importlib.util.module_from_spec(spec)
spec.loader.exec_module(measure_links)


@pytest.mark.parametrize("latency, bandwidth, messages", [(1e-4, 125e6, 1), (5e-6, 5e9, 3)])
def test_latency_and_bandwidth_come_back(latency, bandwidth, messages):
    points = [(size, messages * latency + size / bandwidth) for size in (1e3, 1e5, 1e7)]
    link = measure_links.fit(points, messages)
    assert link.latency == pytest.approx(latency) and link.bandwidth == pytest.approx(bandwidth)


def test_a_latency_is_never_below_zero():
    assert measure_links.fit([(1e3, 1e-6), (1e6, 1.1e-3)], 1).latency >= 0
