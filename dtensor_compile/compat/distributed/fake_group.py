"""A simulated job with one real rank: torch's fake process group, whose collectives return at once and transfer
nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_compile.compat.apply_patches import patched_values
from dtensor_compile.compat.patches import Patch, needs, patch

#: Patches of ``init_process_group`` and ``new_group``, in both modules that export them.
INIT, NEW = (
    tuple(patch(f"{module}:{name}") for module in ("torch.distributed", "torch.distributed.distributed_c10d"))
    for name in ("init_process_group", "new_group")
)


def groups_of(kind: str, job: Callable[[], dict[str, Any]]) -> dict[Patch, Callable[..., Any]]:
    """Replacements for the functions that make process groups, so that all groups have one kind of backend.

    Programs call these functions, so Dynamo traces into them.

    Args:
        kind: the backend, whatever a program asks for.
        job: returns the arguments for the default process group of the calling rank.
    """
    stock_init, stock_new = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            stock_init(kind, **job())

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return stock_new(ranks, timeout, kind, *args, **kwargs)

    return {**dict.fromkeys(INIT, init_process_group), **dict.fromkeys(NEW, new_group)}


@needs(
    "a simulated job with one real rank",
    *INIT,
    *NEW,
    without="reports need a job of real ranks",
    upstream="not reported: nobody else wants every group to be a fake one",
    remove_when="torch has a setting that replaces the backend of every process group",
)
@contextlib.contextmanager
def simulated_job(world: int, rank: int) -> Iterator[None]:
    """While active, this process is `rank` of a simulated job of `world` ranks.

    The default process group exists, the environment is that of ``torchrun``, and process groups that the program makes
    are fake as well, whatever backend it asks for. Values from other ranks are meaningless; shapes are right.
    """
    stock_hook = sys.excepthook

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
            groups = groups_of("fake", lambda: {"store": FakeStore(), "rank": rank, "world_size": world})
            stack.enter_context(patched_values(groups))
            dist.init_process_group()
            yield
    finally:
        sys.excepthook = stock_hook  # each default process group wraps one more around it
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        if dist.is_initialized():
            dist.destroy_process_group()
