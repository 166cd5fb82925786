"""The devices of a job, in the form that `HybridMesh` takes: hosts from environment variables of launchers, NVLink
domains from ``nvidia-smi``; and the cluster that is assumed of it.

One granule per host (`hosts_from_environment`), or one per NVLink domain of each host (`nvlink_devices`). With a
process group, ranks exchange their hosts, so that they may be numbered in any order over the hosts, and hosts may
differ; without one, ranks are numbered host by host, and all hosts are assumed to be like this one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from dtensor_compile.errors import MeshError
from dtensor_compile.topology.links import CLUSTERS, Cluster

#: Environment variables with the number of a process's host: torchrun, Lightning, Slurm.
_HOST = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
#: Environment variables with the number of ranks on a host: torchrun, Open MPI, Slurm.
_ON_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def _number(names: Sequence[str]) -> int | None:
    """The first of these environment variables that is set to a number."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), None)


def on_one_host() -> bool:
    """Whether the launcher started all ranks of the job on this host; the same on all ranks. False if the launcher does
    not set the number of ranks of this host, and for a simulated job."""
    return (
        dist.is_available()
        and dist.is_initialized()
        and dist.get_backend() != "fake"
        and _number(_ON_HOST) == dist.get_world_size()
    )


def default_cluster(device_type: str) -> Cluster:
    """The default cluster without a topology of the user: for CPUs this host if all ranks are on it, else hosts on a 1
    Gbit/s network; for a GPU its preset."""
    return CLUSTERS["h100" if device_type != "cpu" else "cpu-loopback" if on_one_host() else "cpu-1gbit"]


def _exchange(mine: Any) -> list[Any] | None:
    """The values of all ranks, in order of rank; None without a process group."""
    if (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size() == 1
        or dist.get_backend() == "fake"
    ):
        return None
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values


def hosts_from_environment(world_size: int | None = None) -> list[dict[str, Any]]:
    """One device per rank, with the number of its host as ``slice_index``.

    With a process group each rank reports the number of its host (``GROUP_RANK``, ``NODE_RANK``, ``SLURM_NODEID``), and
    all ranks have to call. If one has no number, and without a process group, ``LOCAL_WORLD_SIZE`` consecutive ranks
    are on one host.

    Args:
        world_size: number of ranks, which then do not communicate; by default that of the process group, or
            ``WORLD_SIZE``.

    Raises:
        MeshError: the number of ranks is not known, hosts differ in size, or this rank is not on the host that its
            number implies.
    """
    hosts = None if world_size else _exchange(_number(_HOST))
    if hosts is not None and None not in hosts:
        return [{"name": str(rank), "slice_index": host} for rank, host in enumerate(hosts)]
    n = world_size or (
        dist.get_world_size() if dist.is_available() and dist.is_initialized() else _number(("WORLD_SIZE",)) or 0
    )
    if n < 1:
        raise MeshError("the number of ranks is not known: start the program with torchrun, or give device_attributes")
    local = _number(_ON_HOST) or n
    if n % local:
        raise MeshError(
            f"{local} ranks on this host do not divide the {n} ranks: give device_attributes with slice_index"
        )
    rank, host = _number(("RANK",)), _number(_HOST)
    asked = world_size is None and hosts is None
    if asked and rank is not None and host is not None and rank // local != host:
        raise MeshError(
            f"rank {rank} is on host {host}, so that ranks are not numbered host by host: call init_process_group "
            "first, and ranks exchange the numbers of their hosts, or give device_attributes with slice_index"
        )
    return [{"name": str(rank), "slice_index": rank // local} for rank in range(n)]


def nvlink_devices(
    topology: str | None = None, hosts: Sequence[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """One device per rank, with the number of its NVLink domain as ``slice_index``; domains are counted host by host.

    The i-th rank of a host is assumed to use its GPU i. All ranks have to call.

    Args:
        topology: text of ``nvidia-smi topo -m`` on this host; the tool is called if not given.
        hosts: result of `hosts_from_environment`, which is called if not given.

    Raises:
        MeshError: there is no nvidia-smi, a host has fewer GPUs than ranks, or hosts are not known.
    """
    hosts = hosts_from_environment() if hosts is None else hosts
    domains = nvlink_domains(topology)
    domains_of = _exchange(domains) or [domains] * len(hosts)
    counted: dict[int, int] = {}
    places = []
    for rank, device in enumerate(hosts):
        host = int(device["slice_index"])
        gpu = counted[host] = counted.get(host, -1) + 1
        domain = next((i for i, gpus in enumerate(domains_of[rank]) if gpu in gpus), None)
        if domain is None:
            raise MeshError(
                f"host {host} has {sum(map(len, domains_of[rank]))} GPUs, and rank {rank} would use its GPU {gpu}"
            )
        places.append((host, domain))
    order = sorted(set(places))
    return [{"name": str(rank), "slice_index": order.index(place)} for rank, place in enumerate(places)]


def nvlink_domains(topology: str | None = None) -> list[list[int]]:
    """GPUs of this host that NVLink connects, from ``nvidia-smi topo -m`` (or from its text, given).

    Raises:
        MeshError: there is no nvidia-smi on this host, or it fails.
    """
    if topology is None:
        if shutil.which("nvidia-smi") is None:
            raise MeshError("there is no nvidia-smi on this host: give device_attributes")
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise MeshError(
                f"nvidia-smi topo -m failed: {(done.stderr or done.stdout).strip()[:200]}; give device_attributes"
            )
        topology = done.stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [
        line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s+(X|NV\d+|SYS|NODE|PHB|PXB|PIX)\b", line)
    ]
    domain = list(range(len(rows)))
    for a, row in enumerate(rows):
        for b, word in enumerate(row[1 : len(rows) + 1]):
            if re.fullmatch(r"NV\d+", word):
                old, new = domain[b], domain[a]
                domain = [new if d == old else d for d in domain]
    return [[gpu for gpu, d in enumerate(domain) if d == key] for key in dict.fromkeys(domain)]
