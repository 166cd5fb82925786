"""What a job runs on: links between ranks, and the device of a rank."""

from dtensor_compile.topology.links import CLUSTERS, Cluster, Device, Link, collective_seconds, compute_seconds

__all__ = ["CLUSTERS", "Cluster", "Device", "Link", "collective_seconds", "compute_seconds"]
