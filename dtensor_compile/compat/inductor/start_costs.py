"""Startup costs of a process that finds its graphs and kernels in Inductor's caches: three steps of torch in each
process, whose results are unused or already known.

- The header of C++ kernels is preprocessed and hashed, to find the precompiled one, also where no kernel is compiled.
- A process is started that loads a small library, to see whether the processor's vector instructions can be used.
- Triton's files are hashed, also where there is no GPU; torch throws the result away then.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import hook, needs, patch

_LOAD = patch(
    "torch._inductor.codecache:CppCodeCache.load_async",
    "cls main_code device_type submit_fn extra_flags optimized_code ...",
)
_HEADER = patch("torch._inductor.codecache:_precompile_header", "header hashable_cmd_line compile_command")
_PROBE = patch("torch._inductor.cpu_vec_isa:VecISA._probe_load", "self output_path", optional=True)
_TRITON_KEY = patch("torch._inductor.codecache:triton_key", "")


@needs(
    "starts that only load",
    _LOAD,
    _HEADER,
    _PROBE,
    _TRITON_KEY,
    hook("torch._inductor.codecache:CppCodeCache.cache"),
    without="a process that compiles nothing takes about a second longer to start",
    upstream="not reported: costs of torch's own start, seen where all else comes from a cache",
    remove_when="Inductor looks for a library before it prepares to compile it, keeps what it found out about the "
    "processor, and hashes Triton where there is a GPU",
)
@contextlib.contextmanager
def quick_starts() -> Iterator[None]:
    """While active, this thread does these things only where they are needed."""
    with patched(_LOAD, _load), patched(_PROBE, _probe), patched(_TRITON_KEY, _triton_key):
        yield


def processor() -> str:
    """The kind of this machine's processor: code for one kind runs on all machines of that kind."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _load(stock: Any, cls: Any, main_code: str, device_type: str = "cpu", submit_fn: Any = None, **others: Any) -> Any:
    """Prepares the header only if a library is missing; torch prepares it first."""

    def forget(load: Any) -> None:
        for key in [key for key, known in cls.cache.items() if known is load]:
            del cls.cache[key]

    def with_header() -> Any:
        return stock(cls, main_code, device_type, submit_fn=submit_fn, **others)

    missing: list[Callable[[], None]] = []
    with patched(_HEADER, lambda *args, **kwargs: os.devnull):
        found = stock(cls, main_code, device_type, submit_fn=missing.append, **others)
    if missing:
        forget(found)
        return with_header()

    def load() -> Any:
        nonlocal found
        try:
            return found()
        except Exception:  # it does not load, and whoever tries again builds it
            forget(found)
            found = with_header()
            raise

    return load


def _probe(stock: Any, isa: Any, path: str) -> bool:
    """Whether a library loads: noted beside it, for processes on machines of the same kind."""
    note = pathlib.Path(f"{path}.loads on {processor()}".replace(" ", "_"))
    if os.path.exists(note):
        return True
    loads: bool = stock(isa, path)
    if loads:
        with contextlib.suppress(OSError):
            note.touch()
    return loads


def _triton_key(stock: Any) -> str | None:
    return stock() if torch.cuda.is_available() else None  # type: ignore[no-any-return]
