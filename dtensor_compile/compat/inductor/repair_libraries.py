"""Libraries that Inductor keeps in its cache: those that a process left unfinished when it was killed are built again.

The compiler writes a library under the name by which others find it. Torch takes the file for finished as soon as it is
there, and a later process fails with an ImportError ("file too short"), or dies where it reads what was never written.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._inductor import codecache, cpu_vec_isa

from dtensor_compile.compat.hooks import hook, needs


@needs(
    "damaged libraries in Inductor's cache built again",
    hook(
        "torch._inductor.codecache:CppCodeCache.load_async",
        "cls main_code device_type submit_fn extra_flags optimized_code ...",
    ),
    hook("torch._inductor.codecache:CppCodeCache._load_library", "cls path key"),
    hook("torch._inductor.cpu_vec_isa:VecISA.check_build", "self code"),
    hook("torch._inductor.cpu_vec_isa:VecISA._probe_load", "self output_path"),
    without="they are an error, as in torch",
)
@contextlib.contextmanager
def rebuild_damaged_libraries() -> Iterator[None]:
    """While it is entered, what this thread loads from Inductor's cache is built again where it is no whole library.

    That holds for kernels, and for the small library by which Inductor finds out whether vector instructions can be
    used."""
    kernels, vectors, owner = codecache.CppCodeCache, cpu_vec_isa.VecISA, threading.get_ident()
    load_async, load_library = kernels.load_async.__func__, kernels._load_library.__func__
    check_build, probe = vectors.check_build, vectors._probe_load

    def check(path: str) -> None:
        if threading.get_ident() == owner and not is_whole_library(path):
            os.remove(path)
            raise _Damaged(path)

    def load_whole(cls: Any, path: str, key: str) -> Any:
        check(path)
        return load_library(cls, path, key)

    def probe_whole(self: Any, path: str) -> bool:
        check(path)
        return probe(self, path)

    with (
        mock.patch.object(
            kernels, "load_async", classmethod(lambda *args, **kwargs: _twice(load_async(*args, **kwargs)))
        ),
        mock.patch.object(kernels, "_load_library", classmethod(load_whole)),
        mock.patch.object(vectors, "check_build", lambda self, code: _twice(lambda: check_build(self, code))()),
        mock.patch.object(vectors, "_probe_load", probe_whole),
    ):
        yield


class _Damaged(OSError):
    """The library was not whole and is gone now."""


def _twice(build_and_load: Callable[[], Any]) -> Callable[[], Any]:
    """Runs it again where the library was not whole; what is not there is built."""

    def run() -> Any:
        try:
            return build_and_load()
        except _Damaged:
            return build_and_load()

    return run


def is_whole_library(path: str) -> bool:
    """Whether a file has all of the library that its first bytes announce; files that are no 64-bit ELF count as whole.

    The table of sections is the last part of a library. Offsets are those of the ELF header: its place at byte 40 (8
    bytes), size and number of its entries at byte 58 (2 bytes each).
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(64)
    if len(header) < 64 or not any(header):
        return False
    if header[:5] != b"\x7fELF\x02":
        return True
    (table,), (entry, entries) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return bool(table) and table + entry * entries <= size
