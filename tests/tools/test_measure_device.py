"""A device is measured, and the file is read where it is used."""

import json

import pytest
import torch
import torch.distributed as dist

from dtensor_compile.topology.files import from_values
from tests.tools import load_tool

measure_device = load_tool("measure_device")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(measure_device, "LEAST", 1e-4)
    monkeypatch.setattr(measure_device, "SQUARE", (16, 32))
    monkeypatch.setattr(measure_device, "LAYERS", ((32, 32, 32),))
    monkeypatch.setattr(measure_device, "ATTENTION", ((1, 2, 16, 8), (1, 2, 32, 8)))
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_what_is_measured_on_a_cpu_is_a_device(short):
    found = measure_device.measure("cpu", 1, 1 << 14)
    file = json.loads(json.dumps(measure_device.described(found, "cpu")))
    link = {"latency": 1e-6, "bandwidth": 1e9}
    device = from_values({"inside": link, "between": link, "device": file["device"]}).device
    assert device.achieved is not None and device.basis.startswith("rates measured on CPU")
    assert [size for size, _ in device.achieved.matmul["float32"].points] == [2 * 16**3, 2 * 32**3]
    assert device.achieved.attention["float32"].rate(1e6) > 0 and device.achieved.memory.rate(1e4) > 0
    host = found["host"]
    assert all(host[name] > 0 for name in ("eager", "eager_with_gradient", "call", "dispatch", "dispatched"))
