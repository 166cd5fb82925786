"""A simulated job with one real rank, over torch's fake process group, whose collectives return at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dtensor_compile.compat.distributed.fake_group import simulated_job
from dtensor_compile.errors import OfflineError
from dtensor_compile.ir.mesh import forget_meshes


@contextlib.contextmanager
def job(world: int, rank: int = 0) -> Iterator[None]:
    """While active, this process is `rank` of a job of `world` ranks, as if ``torchrun`` had started it.

    The default process group is initialized. Values received from other ranks are meaningless; shapes are right.

    Raises:
        OfflineError: there is no such rank.
    """
    if not 0 <= rank < world:
        raise OfflineError(f"{rank} is no rank of a job of {world} ranks: they are 0 to {world - 1}")
    try:
        with simulated_job(world, rank):
            yield
    finally:
        forget_meshes()
