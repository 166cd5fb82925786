"""Inductor's folder of caches."""

from __future__ import annotations

from dtensor_compile.compat.patches import feature, hook

_FOLDER = feature(
    "artifacts that were compiled in advance",
    hook("torch._inductor.runtime.cache_dir_utils:cache_dir"),
    without='the option "artifacts" is ignored, and programs are compiled',
)


def cache_folder() -> str:
    """The folder of Inductor's caches, which is made if it is missing.

    Raises:
        OSError: it cannot be made, or this torch has no such folder.
    """
    if not _FOLDER.works():
        raise OSError("this torch has no such folder")
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()
