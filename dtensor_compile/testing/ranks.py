"""Real ranks on one machine for tests: gloo processes that are started once and reused.

    @on_ranks(2)
    def test_sum():                     # runs on both ranks; a failure on any of them fails the test
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [2, 2]

A job that fails or does not answer in time is killed (its processes by their ids) and a new one serves the next test,
so that no test waits forever and none affects another.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtensor_compile.garbage_collection import RARE

#: Seconds that the other ranks have to answer after one has failed.
GRACE = 5.0
#: Imports of the process from which ranks are forked; they start no thread as long as nothing in it has run.
PRELOADED = ["torch", "torch.distributed.tensor", "dtensor_compile.backend"]
#: Variables of the environment that change while tests run, and that nothing reads when torch is imported.
_CHANGING = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
#: Limit on processes kept for tests, over all world sizes: each takes some hundred megabytes.
MOST_RANKS = 12


class RankError(AssertionError):
    """A rank failed, died, or did not answer in time. The message has the answer of each rank."""


def on_ranks(world: int, timeout: float = 120.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function runs on `world` ranks at once, each with the process group initialized (gloo).

    Args:
        world: number of ranks.
        timeout: seconds after which the job is killed and the call fails.

    The decorated function returns the list of the results of all ranks. Arguments and results are pickled. The function
    has to be reachable by its name in its module.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            run_on_ranks(world, function, *args, timeout=timeout, **kwargs)

        return wrapper

    return decorate


def run_on_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Runs ``function(*args, **kwargs)`` on every rank and returns the results in order of rank.

    Raises:
        RankError: a rank raised, died or did not answer within `timeout` seconds.
    """
    job = _jobs.pop(world, None)
    if job is None:
        while _jobs and sum(_jobs) + world > MOST_RANKS:
            _jobs.pop(next(iter(_jobs))).end()
        job = _Job(world)
    _jobs[world] = job  # as the last item, since it was used last
    try:
        return job.call(function, args, kwargs, timeout)
    except RankError:
        _jobs.pop(world, None)
        job.end()
        raise


def make_mesh(shape: Sequence[int], names: Sequence[str] | None = None, device_type: str = "cpu") -> Any:
    """`init_device_mesh`, once per job and rank for the same arguments: tests share the process groups.

    A test that flattens mesh dims should create its own mesh: torch then redistributes over the flattened mesh, for all
    users of the mesh.
    """
    import torch.distributed as dist

    return _make_mesh(dist.group.WORLD, tuple(shape), names and tuple(names), device_type)


@functools.lru_cache(maxsize=256)
def _make_mesh(job: Any, shape: tuple[int, ...], names: tuple[str, ...] | None, device_type: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, shape, mesh_dim_names=names)


class _Job:
    """The processes of one world size, with one pipe to each."""

    def __init__(self, world: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="dtensor_compile_ranks_")
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.processes = []
        environment = dict(os.environ)
        with _process_context() as context:
            for rank in range(world):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, world, self.directory.name, list(sys.path), environment)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)

    def call(self, function: Callable[..., Any], args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        code = sys.modules[function.__module__]
        request = (function.__module__, getattr(code, "__file__", None), function.__qualname__, args, kwargs)
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send(request)
            except OSError as error:
                raise RankError(f"rank {rank} is gone: {error}") from None
        answers: dict[int, tuple[str, Any]] = {}
        deadline, failed = time.monotonic() + timeout, False
        while len(answers) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready: list[Any] = multiprocessing.connection.wait(
                list(waiting), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for pipe in ready:
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    answers[waiting[pipe]] = ("died", self._death(waiting[pipe]))
                if answers[waiting[pipe]][0] != "ok" and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE)
        if len(answers) == len(self.pipes) and not failed:
            return [answers[rank][1] for rank in range(len(self.pipes))]
        raise RankError("\n".join(self._report(rank, answers.get(rank), timeout) for rank in range(len(self.pipes))))

    def _report(self, rank: int, answer: tuple[str, Any] | None, timeout: float) -> str:
        if answer is None:
            return f"rank {rank}: no answer (limit {timeout:g} s); it was at\n{self._stack(rank)}"
        return f"rank {rank}: ok" if answer[0] == "ok" else f"rank {rank}: {answer[1]}"

    def _stack(self, rank: int) -> str:
        with contextlib.suppress(OSError, TypeError):
            os.kill(self.processes[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
            time.sleep(0.3)
            return (pathlib.Path(self.directory.name) / f"stack{rank}").read_text()[-3000:]
        return "(unknown)"

    def _death(self, rank: int) -> str:
        """Description of the end of a rank's process, with its stack if a signal ended it."""
        process = self.processes[rank]
        process.join(timeout=GRACE)
        code = process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        with contextlib.suppress(OSError):
            text = (pathlib.Path(self.directory.name) / f"stack{rank}").read_text()
            if (at := text.rfind("Fatal Python error")) >= 0:  # the thread that died comes first
                how += f"; it was at\n{text[at : at + 3000]}"
        return f"the process ended without an answer, {how}"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(timeout=10)
        self.directory.cleanup()


#: Jobs by world size, least recently used first.
_jobs: dict[int, _Job] = {}


class _Forked:
    """The environment in which the process that ranks are forked from was started."""

    environment: dict[str, str] | None = None


@atexit.register
def end_jobs() -> None:
    """Ends all ranks; the next call of `run_on_ranks` starts new ones."""
    for job in _jobs.values():
        job.end()
    _jobs.clear()


@contextlib.contextmanager
def _process_context() -> Iterator[Any]:
    """The start method of ranks: forked from a process that has imported torch, which takes a tenth of the time of an
    import.

    torch reads its settings from the environment when it is imported: if that has changed since, ranks import it
    themselves."""
    environment = {name: value for name, value in os.environ.items() if name not in _CHANGING}
    if _Forked.environment not in (None, environment):
        yield multiprocessing.get_context("spawn")
        return
    _Forked.environment = environment
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Before Python 3.13 the preloading process has only the import path of its environment.
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    try:
        yield context
    finally:
        del os.environ["PYTHONPATH"]
        if "PYTHONPATH" in environment:
            os.environ["PYTHONPATH"] = environment["PYTHONPATH"]


def _serve(pipe: Any, rank: int, world: int, directory: str, path: list[str], environment: dict[str, str]) -> None:
    """Main loop of a rank's process: answers requests until the pipe closes."""
    stack = open(pathlib.Path(directory) / f"stack{rank}", "w")  # noqa: SIM115 - stays open for the life of the process
    faulthandler.enable(file=stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    import torch
    import torch.distributed as dist

    from dtensor_compile.compat.distributed.gloo import one_gloo_worker

    torch.set_num_threads(1)
    # Imports are permanent; while graphs are traced, the garbage collector runs less often.
    gc.freeze()
    gc.set_threshold(*RARE)
    one_gloo_worker(share_device=True)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    with contextlib.suppress(EOFError, OSError):  # the test session is over
        while True:
            pipe.send(_answer(pipe.recv()))


def _answer(request: tuple) -> tuple[str, Any]:
    import torch

    module_name, file, qualname, args, kwargs = request
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            function: Any = _module(module_name, file)
            for name in qualname.split("."):
                function = getattr(function, name)
            result = getattr(function, "__wrapped__", function)(*args, **kwargs)
        pickle.dumps(result)
        return "ok", result
    except BaseException:  # noqa: BLE001 - a rank reports whatever ended the test
        return "error", traceback.format_exc()
    finally:
        torch.compiler.reset()


def _module(name: str, file: str | None) -> Any:
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name or file is None:
                raise  # else it was loaded from a file that is not on the path
    spec = importlib.util.spec_from_file_location("__rank_main__", file)  # type: ignore[arg-type]
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["__rank_main__"] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module
