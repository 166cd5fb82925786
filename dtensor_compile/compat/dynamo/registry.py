"""torch's table of backends, where several threads ask for one that is not loaded yet."""

from __future__ import annotations

import threading
from typing import Any

from torch._dynamo.backends import registry

from dtensor_compile.compat.hooks import hook, needs


class _Backends(dict[str, Any]):
    """Backends by name. A thread that has loaded a name of ours may register it, though another was first
    (`register_again`).
    """

    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__(known)
        self.loaded = threading.local()

    def __contains__(self, name: object) -> bool:
        if getattr(self.loaded, "name", None) == name:
            self.loaded.name = None
            return False
        return super().__contains__(name)


@needs(
    "backends that several threads load at once",
    hook("torch._dynamo.backends.registry:_COMPILER_FNS"),
    hook("torch._dynamo.backends.registry:register_backend", "compiler_fn name tags"),
    without="one of the threads loads them, and the others raise AssertionError: duplicate name",
)
def register_again(name: str) -> None:
    """This thread is about to register a backend of that name, which another thread may have done since it looked.

    torch looks whether a name is known, loads its entry point, and refuses the name if it is known by then.
    """
    if not isinstance(registry._COMPILER_FNS, _Backends):
        registry._COMPILER_FNS = _Backends(registry._COMPILER_FNS)
    registry._COMPILER_FNS.loaded.name = name
