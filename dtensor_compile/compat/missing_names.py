"""Stand-ins for names of torch that the installed release does not have.

Modules of `compat` import private names of torch at their top, as any module does. Where torch has moved one away, that
import would end the whole backend. So these modules are loaded by `_Loader`: an import of theirs that torch cannot
serve gives a stand-in. A stand-in may be imported further, subclassed, and asked whether something is an instance of it
(nothing is); calling it, or a class derived from it, raises an `UnsupportedTorchError` with the missing name. The
features that the importing module declares do not work then (`patches.Feature`); all others do.
"""

from __future__ import annotations

import builtins
import collections
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from dtensor_compile.errors import UnsupportedTorchError

_PACKAGE = __name__.rpartition(".")[0] + "."

#: Module of ours -> ``module:name`` of each name of torch that it imports and that is not there.
MISSING: dict[str, list[str]] = collections.defaultdict(list)

#: Special attributes of functions, classes and modules that modules of ours read while they are loaded.
_READ = frozenset({"__code__", "__file__", "__mro__"})


class _Absent:
    """Base of classes whose base class is missing."""

    _missing = ""

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        raise _unsupported(cls._missing)


class StandIn:
    """Stand-in for a missing name of torch, and for its members and results."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":
            return self._place.rpartition(":")[2]
        if name.startswith("__") and name not in _READ:
            raise AttributeError(name)
        return StandIn(f"{self._place}.{name}")

    def __call__(self, *_: Any, **__: Any) -> StandIn:
        if _Importing.depth:  # a decorator, or a table that a module makes of it
            return self
        raise _unsupported(self._place)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (type("Missing", (_Absent,), {"_missing": self._place}),)

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: Any) -> StandIn:
        return self

    def __or__(self, other: Any) -> StandIn:
        return self

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self._place} is missing>"


def _unsupported(place: str) -> UnsupportedTorchError:
    return UnsupportedTorchError(f"dtensor_compile: torch {torch.__version__} has no {place}")


class _Importing:
    """Number of modules of ours that are being loaded, and the original ``__import__``."""

    depth = 0
    lock = threading.Lock()
    stock: Any = None

    @classmethod
    def begin(cls) -> None:
        with cls.lock:
            if not cls.depth:
                cls.stock, builtins.__import__ = builtins.__import__, _import
            cls.depth += 1

    @classmethod
    def end(cls) -> None:
        with cls.lock:
            cls.depth -= 1
            if not cls.depth:
                builtins.__import__ = cls.stock


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """``__import__``, with stand-ins for names of torch that modules of ours import and that are missing."""
    stock = _Importing.stock
    importer = (globals or {}).get("__name__", "")
    if level or not fromlist or not name.startswith("torch.") or not importer.startswith(_PACKAGE):
        return stock(name, globals, locals, fromlist, level)
    try:
        module = stock(name, globals, locals, fromlist, level)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        module = None
    missing = [each for each in fromlist if not hasattr(module, each)]  # submodules are there by now
    if not missing:
        return module
    MISSING[importer] += [f"{name}:{each}" for each in missing]
    found = types.SimpleNamespace(**{each: getattr(module, each) for each in fromlist if each not in missing})
    vars(found).update({each: StandIn(f"{name}:{each}") for each in missing})
    return found


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of `compat`."""

    def exec_module(self, module: types.ModuleType) -> None:
        _Importing.begin()
        try:
            super().exec_module(module)
        finally:
            _Importing.end()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of `compat` where Python's own finder finds them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PACKAGE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def tolerate_missing_names() -> None:
    """From now on modules of `compat` are loaded even if names of torch that they import are missing. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
