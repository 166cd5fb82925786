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
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch

#: Of both modules that have them.
INIT, NEW = (
    tuple(patch(f"{module}:{name}") for module in ("torch.distributed", "torch.distributed.distributed_c10d"))
    for name in ("init_process_group", "new_group")
)


@needs(
    "a job whose other ranks are not there",
    *INIT,
    *NEW,
    without="reports need a job of real ranks",
    upstream="not reported: nobody else wants every group to be a fake one",
    remove_when="torch has a setting that replaces the backend of every process group",
)
@contextlib.contextmanager
def simulated_job(world: int, rank: int) -> Iterator[None]:
    """While it is entered, this process is `rank` of a job of `world` ranks that exist in name only.

    The default process group is there, the environment is that of ``torchrun``, and a program that makes process groups
    itself gets such ones, whatever backend it asks for. Values that come from other ranks mean nothing; shapes are
    right."""
    stock_hook = sys.excepthook

    def init(stock: Any, *args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            stock("fake", store=FakeStore(), rank=rank, world_size=world)

    def new(stock: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return stock(ranks, timeout, "fake", *args, **kwargs)

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
    try:
        with contextlib.ExitStack() as stack:
            for rows, ours in ((INIT, init), (NEW, new)):
                for row in rows:
                    stack.enter_context(patched(row, ours, every_thread=True))
            dist.init_process_group()
            yield
    finally:
        sys.excepthook = stock_hook  # each default process group wraps one more around it
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        if dist.is_initialized():
            dist.destroy_process_group()
