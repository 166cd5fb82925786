"""The machine for which a report estimates times by default: that of the program.

In this order: the topology named when it compiles, the GPU that it runs on, and the default of compilations without a
topology (`schedule/schedule_graph.py`). If a program for a GPU is analyzed on a CPU, the machine has to be named.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dtensor_compile.recording.recorder import Recording
from dtensor_compile.topology.devices import default_cluster
from dtensor_compile.topology.gpus import GPUS
from dtensor_compile.topology.links import CLUSTERS, Cluster


@dataclass(frozen=True)
class Machine:
    """A machine, and the reason for it."""

    cluster: Cluster
    known_from: str


def machine_of(recording: Recording) -> Machine:
    """The machine of a recorded program."""
    if recording.topologies:
        return Machine(recording.topologies[0], "the topology that the program names")
    device = next((graph.device for graph in recording.graphs if graph.device != "cpu"), "cpu")
    if device == "cuda" and torch.cuda.is_available():
        here = torch.cuda.get_device_name()
        name = next((name for name, gpu in GPUS.items() if gpu.name == here), None)
        if name is not None:
            return Machine(CLUSTERS[name], f"it runs on {here}")
    why = f"assumed, since it computes on {device}; --cluster or cluster= names another"
    return Machine(default_cluster(device), why)
