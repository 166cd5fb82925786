"""Runs the ranks of a job as threads of this process, one at a time.

A rank runs until a collective has to wait for another rank; then the next rank that can continue runs. Nothing runs
concurrently: changes of torch during a compilation are invisible to other ranks, and a deadlock is an error at once
instead of a timeout. Process-wide state (torch's generator, Dynamo's record of sizes, the environment, and whatever
else the caller names) is kept per rank and restored when its turn comes.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo import config as dynamo_config
from torch._dynamo import pgo
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from dtensor_compile.compat.apply_patches import patched_values
from dtensor_compile.compat.distributed.fake_group import INIT, NEW, groups_of
from dtensor_compile.compat.patches import feature, hook, patch

_THREADED = f"{threaded.__name__}:"
_START = patch(_THREADED + "ProcessLocalGroup._start_coll", "cls collective pg")
_END = patch(_THREADED + "ProcessLocalGroup._end_coll", "cls collective pg")
_BARRIER = patch(_THREADED + "_store_based_barrier")
_ALL_REDUCE = patch(_THREADED + "AllReduce")
_REDUCE_SCATTER = patch(_THREADED + "ReduceScatter")
_WORLD = patch("torch.distributed.distributed_c10d:_world")
_CODE_STATE, _INIT_CODE_STATE = patch("torch._dynamo.pgo:_CODE_STATE"), patch("torch._dynamo.pgo:_INIT_CODE_STATE")
_THREADS = feature(
    "ranks as threads of one process",
    *INIT,
    *NEW,
    _CODE_STATE,
    _INIT_CODE_STATE,
    _ALL_REDUCE,
    _REDUCE_SCATTER,
    hook(_THREADED + "AllReduce.work", "self data"),
    hook(_THREADED + "ReduceScatter.work", "self data"),
    _START,
    _END,
    _BARRIER,
    hook(_THREADED + "ThreadLocalWorld"),
    hook(_THREADED + "ret_work", "ret"),
    _WORLD,
    hook("torch._C._distributed_c10d:_set_thread_isolation_mode"),
    without="programs are compared on ranks that are processes (without `local`)",
    essential=True,
    upstream="not reported: torch's own test infrastructure, private by design",
    remove_when="torch has a public process group whose ranks are threads",
)

#: The backend name by which torch distinguishes meshes of different threads.
_BACKEND = "threaded"

#: Process-wide state of torch that each rank needs for itself.
_STATES: tuple[tuple[Any, str], ...] = ((pgo, "_CODE_STATE"), (pgo, "_INIT_CODE_STATE"))


def is_rank_thread() -> bool:
    """Whether the calling thread is a rank of `run_in_threads`."""
    return getattr(_here, "rank", None) is not None


_here = threading.local()


@dataclass
class _PendingCollective:
    """One collective in progress: the data of the ranks that have arrived."""

    data: list[Any]
    what: str
    arrived: set[int] = field(default_factory=set)
    done: bool = False


class DeadlockError(RuntimeError):
    """All remaining ranks wait for each other."""


class MismatchError(RuntimeError):
    """Ranks of one process group call different collectives."""


class _Stopped(BaseException):
    """Ends a rank after another has failed."""


class _Turns:
    """Schedules the ranks, of which one runs at a time.

    Args:
        world: number of ranks.
        states: modules, names of attributes in them that each rank has for itself, and functions for their initial
            values.
    """

    def __init__(self, world: int, states: Iterable[tuple[Any, str, Callable[[], Any]]]) -> None:
        self.world, self.changed, self.turn = world, threading.Condition(), 0
        self.waits: dict[int, str] = {}  # the collective that a rank waits in
        self.over: set[int] = set()
        self.stopped: BaseException | None = None
        self.pending: dict[Any, _PendingCollective] = {}
        self.counts: dict[Any, int] = {}
        self.states = list(states)
        self.kept = [[make() for _, _, make in self.states] for _ in range(world)]
        self.random = [torch.get_rng_state() for _ in range(world)]

    def begin(self, rank: int) -> None:
        with self.changed:
            self._until_turn(rank)

    def end(self, rank: int, error: BaseException | None) -> None:
        with self.changed:
            self._keep(rank)
            self.over.add(rank)
            if error is not None and self.stopped is None:
                self.stopped = error
            self._pass_on(rank)

    def join(
        self, rank: int, key: Any, place: int, size: int, data: Any, work: Callable[[list[Any]], None], what: str
    ) -> None:
        """Joins a collective of `size` ranks as the rank at `place`; the last to arrive does the work."""
        with self.changed:
            number = self.counts[key, place] = self.counts.get((key, place), 0) + 1
            pending = self.pending.setdefault((key, number), _PendingCollective([None] * size, what))
            if pending.what != what:
                raise MismatchError(
                    f"rank {rank} calls {what}, and ranks {sorted(pending.arrived)} call {pending.what}"
                )
            pending.data[place] = data
            pending.arrived.add(rank)
            if len(pending.arrived) == size:
                del self.pending[key, number]
                work(pending.data)
                pending.done = True
                for other in pending.arrived:
                    self.waits.pop(other, None)
                return
            self.waits[rank] = what
            self._keep(rank)
            self._pass_on(rank)
            self._until_turn(rank)
            if not pending.done:
                raise _Stopped

    def _pass_on(self, rank: int) -> None:
        ready = [
            r for r in (*range(rank + 1, self.world), *range(rank + 1)) if r not in self.over and r not in self.waits
        ]
        if not ready and self.stopped is None and self.waits:
            waits = "; ".join(f"rank {r} waits in {what}" for r, what in sorted(self.waits.items()))
            gone = f"; ranks {sorted(self.over)} have ended" if self.over else ""
            self.stopped = DeadlockError(f"ranks wait for each other for ever: {waits}{gone}")
        if self.stopped is not None:
            self.waits.clear()
            ready = [r for r in range(self.world) if r not in self.over]
        self.turn = ready[0] if ready else -1
        self.changed.notify_all()

    def _until_turn(self, rank: int) -> None:
        self.changed.wait_for(lambda: self.turn == rank)
        torch.set_rng_state(self.random[rank])
        for (module, name, _), value in zip(self.states, self.kept[rank]):
            setattr(module, name, value)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        if self.stopped is not None:
            raise _Stopped

    def _keep(self, rank: int) -> None:
        self.random[rank] = torch.get_rng_state()
        self.kept[rank] = [getattr(module, name) for module, name, _ in self.states]


class _Job:
    """The job whose ranks are currently threads of this process."""

    turns: _Turns | None = None


_job = _Job()


class _Collective:
    """Replaces torch's implementation, which lets threads run concurrently."""

    def __init__(self, collective: Any, group: Any) -> None:
        self.collective, self.group = collective, group

    def join(self, rank: int, data: Any) -> Any:
        assert _job.turns is not None
        ranks = tuple(dist.get_process_group_ranks(self.group))
        what = f"{type(self.collective).__name__.lstrip('_')} among ranks {list(ranks)}"
        key = self.group.pg_name, ranks
        _job.turns.join(_here.rank, key, rank, len(ranks), data, self.collective.work, what)
        return threaded.ret_work(data)


class _Reduce:
    """Reductions, some of which torch's threads lack for reduce-scatter. Terms are added in the order of ranks."""

    def __init__(self, op: Any) -> None:
        self.op = getattr(op, "op", op)

    def reduced(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        ops = dist.ReduceOp
        if self.op in (ops.SUM, ops.AVG):
            total = functools.reduce(torch.add, tensors)
            return total if self.op == ops.SUM else total / len(tensors)
        by_two = {ops.PRODUCT: torch.mul, ops.MIN: torch.minimum, ops.MAX: torch.maximum, ops.BAND: torch.bitwise_and}
        by_two |= {ops.BOR: torch.bitwise_or, ops.BXOR: torch.bitwise_xor}
        return functools.reduce(by_two[self.op], tensors)


class _AllReduce(_Reduce):
    @torch.no_grad()
    def work(self, data: list[Any]) -> None:
        for tensors in zip(*data):
            result = self.reduced([x.detach() for x in tensors])
            for x in tensors:
                x.detach().copy_(result)


class _ReduceScatter(_Reduce):
    @torch.no_grad()
    def work(self, data: list[Any]) -> None:
        for place, (out, _) in enumerate(data):
            out[0].detach().copy_(self.reduced([terms[0][place].detach() for _, terms in data]))


def run_in_threads(
    world: int, function: Callable[[int], Any], states: Iterable[tuple[Any, str, Callable[[], Any]]] = ()
) -> list[Any]:
    """Runs ``function(rank)`` for each rank of a job of `world` ranks in this process; returns the results in order of
    rank.

    Each rank has a default process group; groups that it makes consist of threads as well, whatever backend it asks
    for. Collectives transfer real data; point-to-point messages (``send``, ``isend``) are not supported.

    Args:
        world: number of ranks.
        states: modules, names of attributes in them, and functions for their initial values: kept per rank.

    Raises:
        DeadlockError: no rank can continue.
        MismatchError: ranks of a group call different collectives.
        RuntimeError: this process has a process group.
        UnsupportedTorchError: the installed torch has no such threads.
        Exception: the exception of the first rank that failed, with its rank as a note.
    """
    _THREADS.works()
    if dist.is_initialized():
        raise RuntimeError("this process has a process group of its own: ranks in threads need one that has none")
    results: list[Any] = [None] * world
    with _process_of_ranks(world, [*((module, name, lambda: None) for module, name in _STATES), *states]) as turns:
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(_run_rank, rank, turns, function, results),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if turns.stopped is not None:
        raise turns.stopped
    return results


def _run_rank(rank: int, turns: _Turns, function: Callable[[int], Any], results: list[Any]) -> None:
    """Body of a rank's thread: makes the default group, calls `function` and stores its result."""
    _here.rank = rank
    error: BaseException | None = None
    try:
        turns.begin(rank)
        # Sizes and values of shards depend on the rank, so each rank may recompile as often as it would alone.
        limits: dict[str, Any] = {
            "recompile_limit": turns.world * dynamo_config.recompile_limit,
            "accumulated_recompile_limit": turns.world * dynamo_config.accumulated_recompile_limit,
            "fake_tensor_cache_enabled": False,
        }
        with dynamo_config.patch(**limits), torch.autograd.set_multithreading_enabled(False):
            dist.init_process_group()
            results[rank] = function(rank)
    except _Stopped:
        pass
    except BaseException as raised:  # noqa: BLE001 - the caller gets it
        raised.add_note(f"on rank {rank}")
        error = raised
    finally:
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as raised:  # noqa: BLE001 - as above
            raised.add_note(f"on rank {rank}")
            error = error or raised
        finally:
            turns.end(rank, error)


@contextlib.contextmanager
def _process_of_ranks(world: int, states: Sequence[tuple[Any, str, Callable[[], Any]]]) -> Iterator[_Turns]:
    """While active, threads of this process can be ranks of a job; restores the process afterwards."""
    before = [(module, name, getattr(module, name)) for module, name, _ in states]
    random, environment = torch.get_rng_state(), dict(os.environ)
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]  # not in torch's stubs
    with _threaded_groups(world):
        isolate(True)
        torch.compiler.reset()
        os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        _job.turns = _Turns(world, states)
        try:
            yield _job.turns
        finally:
            _job.turns = None
            isolate(False)
            for module, name, value in before:
                setattr(module, name, value)
            os.environ.clear()
            os.environ.update(environment)
            torch.set_rng_state(random)
            torch.compiler.reset()


@contextlib.contextmanager
def _threaded_groups(world: int) -> Iterator[None]:
    """While active, process groups consist of threads, and their collectives run by `_Turns`."""
    store = dist.HashStore()

    worlds: Any = threaded.ThreadLocalWorld()
    if not hasattr(worlds, "comms"):
        worlds.comms = []  # 2.11 lacks the attribute that ``destroy_process_group`` reads
    values = {
        **groups_of(_BACKEND, lambda: {"store": store, "rank": _here.rank, "world_size": world}),
        _WORLD: worlds,
        _BARRIER: lambda *args: None,
        _START: _Collective,
        _END: lambda collective, group: None,
        _ALL_REDUCE: _AllReduce,
        _REDUCE_SCATTER: _ReduceScatter,
    }
    with contextlib.ExitStack() as stack:
        stack.callback(
            setattr, sys, "excepthook", sys.excepthook
        )  # each default process group wraps one more around it
        stack.enter_context(patched_values(values))
        yield
