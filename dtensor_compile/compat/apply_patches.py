"""Applies rows of the table of patches: the only place that assigns to anything of torch's.

Threads, nesting and undoing are decided here, once:

- A function is replaced on the thread that entered the scope; other threads get torch's.
- Scopes nest, also for one function: the innermost is called first, and is given the next one out as `stock`.
- Scopes of several threads end in any order. The end of the last one restores torch's function.
- A compilation for another backend inside one for ours sees stock torch (`stock_torch`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dtensor_compile.compat.patches import Patch

#: Value of an entry or attribute that is absent while the scope is active.
ABSENT: Any = object()
#: Attribute of a replacement that holds torch's function, which programs call.
STANDS_FOR = "_dtensor_compile_stands_for"
#: Held while a function of torch's is replaced or restored.
_lock = threading.RLock()


class _Thread(threading.local):
    """The nesting depth of compilations for other backends on this thread; each sees no patches from outside of it."""

    level = 0


_thread = _Thread()
#: A thread, and its nesting depth of compilations for other backends.
Place = tuple[int, int]


def this_place() -> Place:
    """The current place; a scope that is entered now replaces a function for calls from the same place."""
    return threading.get_ident(), _thread.level


class _Site:
    """A function of torch's that is replaced on at least one thread, or on all.

    The installed function dispatches on the calling thread, so only the first scope to begin and the last to end assign
    to torch.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.found = inspect.getattr_static(owner, name)
        self.is_own = name in vars(owner)  # not inherited
        self.stock = getattr(self.found, "__func__", None) or getattr(self.found, "fget", None) or self.found
        self.by_place: dict[Place, list[_Layer]] = {}
        self.of_all: list[_Layer] = []

    def top(self, place: Place) -> Callable[..., Any]:
        """The function that a call from `place` goes to."""
        layers = self.by_place.get(place) or self.of_all
        return layers[-1] if layers else self.stock

    def install(self) -> None:
        @functools.wraps(self.stock, updated=() if isinstance(self.stock, type) else functools.WRAPPER_UPDATES)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.top(this_place())(*args, **kwargs)

        setattr(call, STANDS_FOR, self.stock)
        kind = next((k for k in (staticmethod, classmethod, property) if isinstance(self.found, k)), None)
        setattr(self.owner, self.name, call if kind is None else kind(call))
        self.installed = inspect.getattr_static(self.owner, self.name)

    def remove(self) -> None:
        if inspect.getattr_static(self.owner, self.name) is not self.installed:
            return  # wrapped by somebody since; it calls torch's function from now on
        if self.is_own:
            setattr(self.owner, self.name, self.found)
        else:
            delattr(self.owner, self.name)


class _Layer:
    """One scope's replacement of a function, in a stack with those of other scopes."""

    def __init__(self, site: _Site, layers: list[_Layer], replacement: Callable[..., Any]) -> None:
        self.site, self.layers, self.replacement = site, layers, replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.replacement(self.below(), *args, **kwargs)

    def below(self) -> Callable[..., Any]:
        """The `stock` of the replacement, looked up at each call, as the enclosing scope may have ended."""
        place = self.layers.index(self)
        if place:
            return self.layers[place - 1]
        of_all = self.site.of_all
        return of_all[-1] if of_all and self.layers is not of_all else self.site.stock


#: Sites by id of the owner and name of the function; the site keeps the owner alive.
_sites: dict[tuple[int, str], _Site] = {}


@contextlib.contextmanager
def patched(row: Patch, replacement: Callable[..., Any], *, every_thread: bool = False) -> Iterator[None]:
    """While active, calls of the function of `row` go to ``replacement(stock, *args, **kwargs)``.

    Args:
        row: of a function, a method (its object is the first argument), a class method, a static method, the getter of
            a property, or a class that is called.
        replacement: its first argument is the previous function: torch's, or that of an enclosing scope.
        every_thread: replaces the function for calls on other threads, too.

    Use `patched_value` for a function that programs call and that Dynamo therefore traces: Dynamo cannot look into the
    function that is installed here.
    """
    if row.optional and not row.is_there():
        yield
        return
    put_back = _put(row, replacement, every_thread)
    try:
        yield
    finally:
        put_back()


def _put(row: Patch, replacement: Callable[..., Any], every_thread: bool) -> Callable[[], None]:
    """Installs a replacement; returns a function that removes it."""
    owner, name = row.target()
    place, key = this_place(), (id(owner), name)
    with _lock:
        site = _sites.get(key)
        if site is None:
            site = _sites[key] = _Site(owner, name)
            site.install()
        layers = site.of_all if every_thread else site.by_place.setdefault(place, [])
        layer = _Layer(site, layers, replacement)
        layers.append(layer)

    def put_back() -> None:
        with _lock:
            layers.remove(layer)
            if not site.by_place.get(place, True):
                del site.by_place[place]
            if not site.by_place and not site.of_all:
                site.remove()
                _sites.pop(key, None)

    return put_back


def is_called_from(module: types.ModuleType) -> bool:
    """Whether the replacement that calls this was itself called from code of `module`."""
    frame = sys._getframe(2)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals is vars(module)


@contextlib.contextmanager
def seen_from(place: Place) -> Iterator[None]:
    """While active, this thread sees the patches that were installed at `place`, a place of the same thread."""
    before, _thread.level = _thread.level, place[1]
    try:
        yield
    finally:
        _thread.level = before


def stock_torch() -> contextlib.AbstractContextManager[None]:
    """While active, this thread sees torch's functions, unpatched: another backend compiles."""
    thread, level = this_place()
    return seen_from((thread, level + 1))


#: Values that scopes installed: the original value, and those of the open scopes in order.
_values: dict[tuple[int, Any], tuple[Any, list[tuple[object, Any]]]] = {}


@contextlib.contextmanager
def _in_place(key: tuple[int, Any], before: Any, value: Any, put: Callable[[Any], None]) -> Iterator[None]:
    """While active, a value is installed on every thread; scopes end in any order."""
    entry = object(), value
    with _lock:
        first, open_ = _values.setdefault(key, (before, []))
        open_.append(entry)
        put(value)
    try:
        yield
    finally:
        with _lock:
            open_.remove(entry)
            put(open_[-1][1] if open_ else first)
            if not open_:
                _values.pop(key, None)


@contextlib.contextmanager
def patched_value(row: Patch, value: Any) -> Iterator[None]:
    """While active, the attribute of `row` is `value` on every thread; it need not have existed before."""
    owner, name = row.target()

    def put(value: Any) -> None:
        if value is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    before = inspect.getattr_static(owner, name, ABSENT) if name in vars(owner) else ABSENT
    with _in_place((id(owner), name), before, value, put):
        yield


@contextlib.contextmanager
def patched_values(values: Mapping[Patch, Any]) -> Iterator[None]:
    """`patched_value` of several rows."""
    with contextlib.ExitStack() as stack:
        for row, value in values.items():
            stack.enter_context(patched_value(row, value))
        yield


@contextlib.contextmanager
def patched_entries(row: Patch, entries: Mapping[Any, Any], table: Any = None) -> Iterator[None]:
    """While active, the dict of `row` has these entries on every thread.

    Args:
        entries: by key; `ABSENT` removes one.
        table: the dict; by default, the attribute that `row` names.
    """
    if table is None:
        owner, name = row.target()
        table = getattr(owner, name)

    def put(key: Any) -> Callable[[Any], None]:
        return lambda value: table.pop(key, None) if value is ABSENT else table.__setitem__(key, value)

    with contextlib.ExitStack() as stack:
        for key, value in entries.items():
            stack.enter_context(_in_place((id(table), key), table.get(key, ABSENT), value, put(key)))
        yield


def on_this_thread(stock: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A function for a table: ``replacement(stock, ...)`` on this thread (as for `patched`), `stock` elsewhere."""
    place = this_place()

    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(stock, *args, **kwargs) if this_place() == place else stock(*args, **kwargs)

    return call


def patch_for_good(row: Patch, replacement: Callable[..., Any]) -> None:
    """From now on calls of the function of a `lasting` row go to ``replacement(stock, ...)``."""
    assert row.lasting, row
    _put(row, replacement, every_thread=True)


def set_for_good(row: Patch, value: Any) -> None:
    """From now on the attribute of a `lasting` row is `value`."""
    assert row.lasting, row
    setattr(*row.target(), value)
