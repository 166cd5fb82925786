"""Libraries that Inductor keeps in its cache: those that a process left unfinished when it was killed are built again.

The compiler writes a library under the name by which others find it. Torch takes the file for finished as soon as it is
there, and a later process fails with an ImportError ("file too short"), or dies where it reads what was never written.
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
    "damaged libraries in Inductor's cache built again",
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
    """While active, what this thread loads from Inductor's cache is built again where it is no whole library.

    That holds for kernels, and for the small library by which Inductor finds out whether vector instructions can be
    used."""

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
