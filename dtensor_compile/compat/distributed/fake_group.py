"""A job whose other ranks are not there: torch's fake process group, whose collectives return at once and move
nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def simulated_job(world: int, rank: int) -> Iterator[None]:
    """While it is entered, this process is `rank` of a job of `world` ranks that exist in name only.

    The default process group is there, the environment is that of ``torchrun``, and a program that makes process groups
    itself gets such ones, whatever backend it asks for. Values that come from other ranks mean nothing; shapes are
    right."""
    stock_init, stock_new, stock_hook = dist.init_process_group, dist.new_group, sys.excepthook

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            stock_init("fake", store=FakeStore(), rank=rank, world_size=world)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return stock_new(ranks, timeout, "fake", *args, **kwargs)

    torchrun = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }
    before = {name: os.environ.get(name) for name in torchrun}
    os.environ.update({name: str(value) for name, value in torchrun.items()})
    for module in (dist, distributed_c10d):
        module.init_process_group, module.new_group = init_process_group, new_group  # type: ignore[attr-defined]
    try:
        init_process_group()
        yield
    finally:
        for module in (dist, distributed_c10d):
            module.init_process_group, module.new_group = stock_init, stock_new  # type: ignore[attr-defined]
        sys.excepthook = stock_hook  # each default process group wraps one more around it
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        if dist.is_initialized():
            dist.destroy_process_group()
