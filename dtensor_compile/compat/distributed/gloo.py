"""Gloo process groups that run one collective at a time, and that share a device.

A gloo group of torch has two workers. Each writes the name of the collective that it completed into one string of the
group, without a lock (``ProcessGroupGloo::runLoop``, ``lastCompletedWorkName``). Names of more than 15 characters, such
as those of gathers (``ALLGATHER_COALESCED``), are on the heap: two workers that complete a gather at the same time free
one string twice, and the process dies later, by SIGSEGV or with "malloc(): unaligned tcache chunk detected". Seen on
torch 2.11.0, 2.13.0 and 2.14.1 without this package, about once in 100,000 iterations with two gathers of four numbers
in flight. Eager DTensors usually have one in flight, compiled programs more. With one worker, a group completes one
collective after the other.

torch also makes a device for each group, and a device has a thread that wakes up 120 times a second even if nothing is
sent (measured on 2.13). A process that makes groups for a thousand tests, with several ranks on one machine, spends its
time on that."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtensor_compile.compat.apply_patches import set_for_good
from dtensor_compile.compat.patches import feature, hook, patch

_GLOO = "torch.distributed.distributed_c10d:ProcessGroupGloo"
_GROUPS = patch(_GLOO, lasting=True)
_OPTIONS = feature(
    "gloo groups that complete one collective after the other",
    _GROUPS,
    hook(f"{_GLOO}._Options"),
    hook(f"{_GLOO}.create_default_device"),
    without="two gathers that end at once can crash the process (a bug of torch), and tests that make many groups take "
    "longer",
    upstream="not reported: a race in ProcessGroupGloo::runLoop (lastCompletedWorkName), seen once in some 100,000 "
    "gathers",
    remove_when="ProcessGroupGloo writes lastCompletedWorkName under a lock",
)


def one_gloo_worker(share_device: bool = False) -> None:
    """From now on, for good, each gloo group that this process makes completes one collective after the other.

    torch's groups have two workers, which can crash the process if two gathers of a group complete at once. Call this
    on every rank before ``init_process_group``. Collectives of one group no longer overlap (they share the network in
    any case); those of other groups and computation do.

    Args:
        share_device: the groups also share the thread that waits for the network.
    """
    if not _OPTIONS.works():
        return
    stock: Any = distributed_c10d.ProcessGroupGloo
    shared = _devices(stock) if share_device else None

    class OneWorker(type(stock)):  # type: ignore[misc]
        def __call__(cls, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, **more: Any) -> Any:
            options = stock._Options()
            options._timeout, options._threads = timeout, 1
            options._devices = shared or _devices(stock)
            for name, value in more.items():  # of torch 2.14: enable_reconfigure
                setattr(options, name, value)
            return stock(store, rank, size, options)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, stock)

    set_for_good(_GROUPS, OneWorker(stock.__name__, (stock,), {}))


def _devices(stock: Any) -> list[Any]:
    """Devices of the interfaces that ``GLOO_SOCKET_IFNAME`` names, as torch makes them; else the default one."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return [stock.create_device(interface=name) for name in names.split(",") if name] or [stock.create_default_device()]
