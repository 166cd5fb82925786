"""Gloo: process groups that share a device.

torch makes a device for each group, and a device has a thread that wakes up 120 times a second, whether anything is sent or not
(measured on 2.13). A process that makes groups for a thousand tests, on a machine that runs some of its ranks, spends its time on that.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtensor_compile.compat.hooks import feature, hook

_GLOO = "torch.distributed.distributed_c10d:ProcessGroupGloo"
_ONE_DEVICE = feature(
    "groups of ranks in tests share a thread",
    hook(_GLOO),
    hook(f"{_GLOO}._Options"),
    hook(f"{_GLOO}.create_default_device"),
    without="tests that make many groups take longer",
)


def share_devices() -> None:
    """From here on the gloo groups that this process makes share one device; for good. Call it before the first is made."""
    if not _ONE_DEVICE.works():
        return
    stock: Any = distributed_c10d.ProcessGroupGloo
    device = stock.create_default_device()

    class Sharing(type(stock)):  # type: ignore[misc]
        def __call__(cls, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, **more: Any) -> Any:
            options = stock._Options()
            options._timeout, options._devices = timeout, [device]
            for name, value in more.items():  # of torch 2.14: enable_reconfigure
                setattr(options, name, value)
            return stock(store, rank, size, options)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, stock)

    distributed_c10d.ProcessGroupGloo = Sharing(stock.__name__, (stock,), {})
