"""Jobs of real ranks that end as those of a user's program do: each rank is a process of its own with its own
environment, and one that raises ends, so that the others lose their connections to it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dtensor_compile.testing.ranks import _process_context

#: Seconds within which ranks have imported what they need and joined the process group.
READY = 180.0


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    Attributes:
        value: what its function returned.
        error: the traceback if it raised; "no answer" and its last state if it was still running at the limit.
        seconds: from when all ranks were ready until it returned or raised.
    """

    value: Any
    error: str
    seconds: float


def run_job(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    environments: Sequence[dict[str, str]] = (),
    limit: float = 60.0,
    imports: bool = False,
    store_of_rank_0: bool = False,
) -> list[Outcome]:
    """Runs ``function(*args)`` in `world` new processes, and returns how each ended, in order of rank.

    Args:
        environments: variables of each rank, on top of those of this process.
        limit: seconds after which ranks that still run are killed.
        imports: whether each process imports torch and the package itself, which takes seconds; else it is forked from
            one that has them.
        store_of_rank_0: whether the store of the job is in the process of rank 0, and ends with it.
    """
    environments = [*environments, *[{}] * (world - len(environments))]
    with tempfile.TemporaryDirectory(prefix="dtensor_compile_job_") as directory:
        pipes, processes = [], []
        address = f"tcp://127.0.0.1:{_free_port()}" if store_of_rank_0 else f"file://{directory}/store"
        with contextlib.nullcontext(multiprocessing.get_context("spawn")) if imports else _process_context() as context:
            for rank, own in enumerate(environments):
                ours, theirs = context.Pipe()
                environment = {**os.environ, **own}
                arguments = (theirs, rank, world, address, list(sys.path), environment, function, args)
                processes.append(context.Process(target=_run, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
        try:
            return _outcomes(pipes, limit)
        finally:
            for process in processes:
                process.join(timeout=2.0)
                process.kill()
                process.join(timeout=10.0)


def _outcomes(pipes: list[Any], limit: float) -> list[Outcome]:
    ready = [_receive(pipe, READY) for pipe in pipes]
    assert all(isinstance(at, float) for at in ready), f"not all ranks are ready: {ready}"
    begin, deadline = max(ready), time.monotonic() + limit
    found = []
    for pipe in pipes:
        ended = _receive(pipe, max(0.0, deadline - time.monotonic()))
        value, error, at = ended or (None, "no answer", time.time())
        found.append(Outcome(value, error, at - begin))
    return found


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _receive(pipe: Any, limit: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(limit) else None
    except (EOFError, OSError):
        return None, "the process ended without an answer", time.time()


def _run(
    pipe: Any,
    rank: int,
    world: int,
    address: str,
    path: list[str],
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple,
) -> None:
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    from dtensor_compile.native.loader import native

    native()  # built now where it is missing
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    dist.barrier()
    pipe.send(time.time())
    try:
        pipe.send((function(*args), "", time.time()))
    except BaseException:  # noqa: BLE001 - reported; the process ends with it, as a user's would
        pipe.send((None, traceback.format_exc(), time.time()))
        pipe.close()
        sys.exit(1)
    dist.barrier()
