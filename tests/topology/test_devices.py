"""What is assumed of the machine without a topology: the host that all ranks are on, where the launcher says so."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from dtensor_compile import offline
from dtensor_compile.recording.recorder import record
from dtensor_compile.report.machine import machine_of
from dtensor_compile.testing import on_ranks
from dtensor_compile.topology.devices import default_cluster, on_one_host


def compiled_machine():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = DTensor.from_local(torch.ones(8), mesh, [Partial()], run_check=False)
    with record() as recording:
        torch.compile(lambda x: x.redistribute(placements=[Replicate()]).to_local(), backend="dtensor")(x)
    return machine_of(recording)


@on_ranks(2)
def test_ranks_that_a_launcher_started_on_one_host():
    assert on_one_host() and default_cluster("cpu").name == "cpu-loopback" and default_cluster("cuda").name == "h100"
    machine = compiled_machine()
    assert machine.cluster.name == "cpu-loopback" and machine.known_from.startswith("assumed")
    for number in ("1", ""):  # more hosts, and a launcher that says nothing
        os.environ["LOCAL_WORLD_SIZE"] = number
        torch._dynamo.reset()
        assert not on_one_host() and compiled_machine().cluster.name == "cpu-1gbit"


def test_a_job_in_name_only_is_on_no_host():
    with offline.job(4):
        assert not on_one_host() and default_cluster("cpu").name == "cpu-1gbit"
    assert not on_one_host()
