"""The hardware of a job: links between ranks, the device of a rank, properties of the communication backend.

- ``links``: links, devices, clusters of them with presets, and the times that follow.
- ``files``: topologies by name or from a file, and written to one.
- ``backends``: traffic of communication backends beyond the textbook.
- ``network``: the links along the dims of one mesh, and the topology for which plans are made.
"""

from dtensor_compile.topology.files import from_values, save_topology, to_values, topology
from dtensor_compile.topology.links import (
    CLUSTERS,
    LINKS,
    Cluster,
    Device,
    Link,
    collective_seconds,
    compute_seconds,
    seconds_over,
)

__all__ = [
    "CLUSTERS", "LINKS", "Cluster", "Device", "Link", "collective_seconds", "compute_seconds", "from_values",
    "save_topology", "seconds_over", "to_values", "topology",
]  # fmt: skip
