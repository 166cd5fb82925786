"""Thread-safe registration of our backends in torch's table."""

from __future__ import annotations

import threading
from typing import Any

from torch._dynamo.backends import registry

from dtensor_compile.compat.apply_patches import set_for_good
from dtensor_compile.compat.patches import feature, hook, patch


class _Backends(dict[str, Any]):
    """Backends by name. A thread that has loaded one of our names may register it again (`register_again`)."""

    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__(known)
        self.loaded = threading.local()

    def __contains__(self, name: object) -> bool:
        if getattr(self.loaded, "name", None) == name:
            self.loaded.name = None
            return False
        return super().__contains__(name)


_BACKENDS = patch("torch._dynamo.backends.registry:_COMPILER_FNS", lasting=True)


_AGAIN = feature(
    "backends that several threads load at once",
    _BACKENDS,
    hook("torch._dynamo.backends.registry:register_backend", "compiler_fn name tags"),
    without="one of the threads loads them, and the others raise AssertionError: duplicate name",
    upstream="not reported: few programs compile first on several threads",
    remove_when="lookup_backend loads an entry point under a lock",
)


@_AGAIN.done_by
def register_again(name: str) -> None:
    """Allows this thread to register a backend that another thread may have registered meanwhile.

    torch checks whether a name is known, loads its entry point, and refuses the name if it is known by then.
    """
    if not _AGAIN.works():
        return
    known = registry._COMPILER_FNS
    if not isinstance(known, _Backends):
        known = _Backends(known)
        set_for_good(_BACKENDS, known)
    known.loaded.name = name
