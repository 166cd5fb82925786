"""Rebuilds libraries in Inductor's cache that a killed process left incomplete.

The compiler writes a library under its final name. torch takes the file for complete as soon as it exists, and a later
process fails with an ImportError ("file too short"), or crashes when it reads a part that was never written.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch

_LOAD = patch(
    "torch._inductor.codecache:CppCodeCache.load_async",
    "cls main_code device_type submit_fn extra_flags optimized_code ...",
)
_LOAD_LIBRARY = patch("torch._inductor.codecache:CppCodeCache._load_library", "cls path key")
_CHECK = patch("torch._inductor.cpu_vec_isa:VecISA.check_build", "self code")
_PROBE = patch("torch._inductor.cpu_vec_isa:VecISA._probe_load", "self output_path")


@needs(
    "rebuilt libraries in Inductor's cache",
    _LOAD,
    _LOAD_LIBRARY,
    _CHECK,
    _PROBE,
    without="they are an error, as in torch",
    upstream="#102539",
    remove_when="Inductor links libraries under another name and renames them, or rebuilds one that does not load",
)
@contextlib.contextmanager
def rebuild_damaged_libraries() -> Iterator[None]:
    """While active, incomplete libraries that this thread loads from Inductor's cache are rebuilt.

    This covers kernels, and the small library by which Inductor tests for vector instructions.
    """

    def check(path: str) -> None:
        if not is_whole_library(path):
            os.remove(path)
            raise _Damaged(path)

    def load(stock: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        return _twice(stock(*args, **kwargs))

    def load_whole(stock: Any, cls: Any, path: str, key: str) -> Any:
        check(path)
        return stock(cls, path, key)

    def check_build(stock: Any, self: Any, code: str) -> Any:
        return _twice(lambda: stock(self, code))()

    def probe_whole(stock: Any, self: Any, path: str) -> bool:
        check(path)
        return stock(self, path)  # type: ignore[no-any-return]

    with (
        patched(_LOAD, load),
        patched(_LOAD_LIBRARY, load_whole),
        patched(_CHECK, check_build),
        patched(_PROBE, probe_whole),
    ):
        yield


class _Damaged(OSError):
    """The library was incomplete, and has been removed."""


def _twice(build_and_load: Callable[[], Any]) -> Callable[[], Any]:
    """Retries once after an incomplete library was removed; a missing one is built."""

    def run() -> Any:
        try:
            return build_and_load()
        except _Damaged:
            return build_and_load()

    return run


def is_whole_library(path: str) -> bool:
    """Whether a file has the length that its ELF header implies; files that are not 64-bit ELF count as complete.

    The section table is the last part of a library. Its offset is at byte 40 of the ELF header (8 bytes), size and
    number of its entries at byte 58 (2 bytes each).
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
