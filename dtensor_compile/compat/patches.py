"""The table of patches: what this package replaces, or calls, of torch under a private name, and why.

A row stands beside what takes the place of the function, in the declaration of the feature that needs it:

    PLACE = patch("torch._functorch.partitioners:functionalize_rng_ops", "joint_module fw_module ...")

    @needs("a feature", PLACE, hook("torch._functorch.partitioners:is_opaque_node", "node"), without="this happens",
           upstream="not reported: ...", remove_when="torch does this itself")
    @contextlib.contextmanager
    def place_random_states() -> Iterator[None]:
        def place(stock, joint_module, fw_module, *rest): ...

        with patched(PLACE, place):
            yield

`patched` is the one place that assigns to anything of torch's (with `patched_value`, `patched_entries` and
`patch_for_good` below it), so that threads, nesting and undoing are decided once:

- A function is replaced on the thread that entered the scope; other threads get torch's.
- Scopes nest, on one function too: the innermost is called first, and is handed the one around it as `stock`.
- Scopes of several threads end in any order. The function is torch's own again with the end of the last one.
- A compilation for another backend inside of one for ours sees stock torch (`stock_torch`).

Where torch has no such function, or one with other parameters, the scope is not entered: the feature is missing, which
one warning says, with the name of the function; the rest works. A feature is `essential` where numbers could be wrong
without it, or where a program asks for it by name: what would use it is an error then. ``docs/patches.md`` is made of
`FEATURES`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import torch
from torch.utils._config_module import ConfigModule

from dtensor_compile.errors import UnsupportedTorchError

P = ParamSpec("P")


class MissingHookWarning(UserWarning):
    """A feature of this package does not work under the installed torch release."""


@dataclass(frozen=True)
class Hook:
    """One function, method, class or table of torch's.

    Attributes:
        place: ``module:name`` or ``module:Class.name``; in a module of settings the name of one.
        takes: parameter lists that we know how to call, names with blanks between; ``...`` at the end allows more of
            them. None: it is enough that the name is there.
    """

    place: str
    takes: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """What is wrong with it in the installed release, as the end of a sentence; None where it is as it should
        be.
        """
        module, _, path = self.place.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = found._config[name] if isinstance(found, ConfigModule) else inspect.getattr_static(found, name)
        except (ImportError, AttributeError, KeyError):
            return f"has no {self.place}"
        if not self.takes:
            return None
        try:
            parameters = [*inspect.signature(getattr(found, "__func__", found)).parameters]
        except (TypeError, ValueError):
            return None  # C++ code does not tell
        if any(_matches(parameters, text.split()) for text in self.takes):
            return None
        return (
            f"has {self.place}({', '.join(parameters)}), and not "
            f"({' or '.join(', '.join(text.split()) for text in self.takes)})"
        )


def _matches(parameters: list[str], known: list[str]) -> bool:
    if known[-1:] == ["..."]:
        return parameters[: len(known) - 1] == known[:-1]
    return parameters == known


def if_there(place: str) -> Any:
    """What is at ``module:name``; None where the installed release has no such thing."""
    module, _, name = place.partition(":")
    with contextlib.suppress(ImportError):
        found = getattr(importlib.import_module(module), name, None)
        return found if found is not None else importlib.import_module(f"{module}.{name}")
    return None


@dataclass(frozen=True)
class Patch(Hook):
    """A `Hook` that a function of ours takes the place of, while a scope is entered or (`lasting`) for good.

    Attributes:
        lasting: it stays in place once it is.
        optional: torch may have no such thing: nothing is replaced then; a value is added, and taken away again.
    """

    lasting: bool = False
    optional: bool = False

    def problem(self) -> str | None:
        return None if self.optional else super().problem()

    def is_there(self) -> bool:
        """Whether the installed release has it, whatever its parameters."""
        owner, name = self.target()
        return inspect.getattr_static(owner, name, ABSENT) is not ABSENT

    def target(self) -> tuple[Any, str]:
        """What holds the function, and its name there.

        Raises:
            ImportError, AttributeError: the installed release has no such thing; its feature does not work then.
        """
        module, _, path = self.place.partition(":")
        *owners, name = path.split(".")
        return functools.reduce(getattr, owners, importlib.import_module(module)), name


def hook(place: str, *takes: str) -> Hook:
    """A function, method, class or table of torch's that is called or read, and not replaced."""
    return Hook(place, takes)


def patch(place: str, *takes: str, lasting: bool = False, optional: bool = False) -> Patch:
    """A function, method, class or table of torch's that is replaced."""
    return Patch(place, takes, lasting, optional)


@dataclass
class Feature:
    """Something that this package does by hooks.

    Attributes:
        name: what it is, as a row of a table.
        hooks: all that it needs.
        without: what happens where one is missing.
        essential: whether that is an error.
        upstream: the issue or pull request at torch's, or ``not reported: `` and why.
        remove_when: what torch has to do itself for the patches to go.
        scope: where it is done, ``module:function``, and the first sentence of that function's docstring.
    """

    name: str
    hooks: tuple[Hook, ...]
    without: str
    essential: bool = False
    upstream: str = ""
    remove_when: str = ""
    scope: tuple[str, str] = ("", "")
    _known: dict[Hook, str | None] = field(default_factory=dict)
    _told: bool = False

    def __post_init__(self) -> None:
        """Looks at what is there already: later, scopes may have put functions of ours into the place of others. What
        is not imported yet is looked at when the feature is first used.

        Raises:
            TypeError: something is replaced, and it is not said why torch does not do it or when that can go.
        """
        if any(isinstance(hook, Patch) for hook in self.hooks) and not (self.upstream and self.remove_when):
            raise TypeError(f"{self.name}: a feature with patches needs `upstream` and `remove_when`")
        self._known = {hook: hook.problem() for hook in self.hooks if hook.place.partition(":")[0] in sys.modules}

    def problems(self) -> list[str]:
        """What is wrong with its hooks in the installed release."""
        for hook in self.hooks:
            if hook not in self._known:
                self._known[hook] = hook.problem()
        return [problem for hook in self.hooks if (problem := self._known[hook]) is not None]

    def works(self) -> bool:
        """Whether the installed release has what it needs; warns the first time where it has not.

        Raises:
            UnsupportedTorchError: it is essential, and a hook is missing.
        """
        problems = self.problems()
        if not problems:
            return True
        text = (
            f"dtensor_compile: {self.name}: torch {torch.__version__} {'; '.join(problems)}. Without it {self.without}"
        )
        if self.essential:
            raise UnsupportedTorchError(text)
        if not self._told:
            warnings.warn(text, MissingHookWarning, stacklevel=3)
        self._told = True
        return False


#: All features that need hooks, by name.
FEATURES: dict[str, Feature] = {}


def feature(
    name: str, *hooks: Hook, without: str, essential: bool = False, upstream: str = "", remove_when: str = ""
) -> Feature:
    """A new `Feature`, one of `FEATURES`."""
    FEATURES[name] = made = Feature(name, hooks, without, essential, upstream, remove_when)
    return made


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    """A scope in which all is as it is; it can decorate a function, as those of `needs` can."""
    yield


def needs(
    name: str, *hooks: Hook, without: str, essential: bool = False, upstream: str = "", remove_when: str = ""
) -> Callable[[Callable[P, AbstractContextManager[None]]], Callable[P, AbstractContextManager[None]]]:
    """A scope that is a `Feature`: it is entered only where that works. For functions that make context managers."""
    of = feature(name, *hooks, without=without, essential=essential, upstream=upstream, remove_when=remove_when)

    def decorate(scope: Callable[P, AbstractContextManager[None]]) -> Callable[P, AbstractContextManager[None]]:
        sentence = " ".join((scope.__doc__ or "").partition("\n\n")[0].split())
        of.scope = f"{scope.__module__}:{scope.__qualname__}", sentence

        @functools.wraps(scope)
        def entered(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[None]:
            return scope(*args, **kwargs) if of.works() else _nothing()

        return entered

    return decorate


# ---- how a row is applied ------------------------------------------------------------------------------------------

#: Of an entry: there is none while the scope is entered.
ABSENT: Any = object()
#: Attribute of a function that stands in the place of one of torch's: that one, which programs call.
STANDS_FOR = "_dtensor_compile_stands_for"
#: Holds while a function of torch's is replaced or put back.
_lock = threading.RLock()


class _Site:
    """A function of torch's that is replaced on at least one thread, or on all.

    What stands in its place asks which thread calls, so that nothing but the first scope to begin and the last to end
    assigns to torch.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.found = inspect.getattr_static(owner, name)
        self.is_own = name in vars(owner)  # and not that of a base
        self.stock = getattr(self.found, "__func__", None) or getattr(self.found, "fget", None) or self.found
        self.of_thread: dict[int, list[Callable[..., Any]]] = {}
        self.of_all: list[Callable[..., Any]] = []

    def top(self, thread: int) -> Callable[..., Any]:
        """What a call on a thread goes to."""
        layers = self.of_thread.get(thread) or self.of_all
        return layers[-1] if layers else self.stock

    def install(self) -> None:
        of_thread, of_all, stock, this_thread = self.of_thread, self.of_all, self.stock, threading.get_ident

        @functools.wraps(stock, updated=() if isinstance(stock, type) else functools.WRAPPER_UPDATES)
        def call(*args: Any, **kwargs: Any) -> Any:
            layers = of_thread.get(this_thread()) or of_all  # `top`, without the call: sizes come here by the 100,000
            return (layers[-1] if layers else stock)(*args, **kwargs)

        setattr(call, STANDS_FOR, stock)
        kind = next((k for k in (staticmethod, classmethod, property) if isinstance(self.found, k)), None)
        setattr(self.owner, self.name, call if kind is None else kind(call))
        self.installed = inspect.getattr_static(self.owner, self.name)

    def remove(self) -> None:
        if inspect.getattr_static(self.owner, self.name) is not self.installed:
            return  # somebody wrapped it since; it calls torch's function from now on
        if self.is_own:
            setattr(self.owner, self.name, self.found)
        else:
            delattr(self.owner, self.name)


#: By what holds the function and its name. The owner is kept by its site.
_sites: dict[tuple[int, str], _Site] = {}


@contextlib.contextmanager
def patched(row: Patch, replacement: Callable[..., Any], *, every_thread: bool = False) -> Iterator[None]:
    """While it is entered, calls of the function of `row` go to ``replacement(stock, *args, **kwargs)``.

    Args:
        row: of a function, a method (its object is the first argument), a class method, a static method, the getter of
            a property, or a class that is called.
        replacement: is given what was there before, torch's or that of a scope around this one, as first argument.
        every_thread: calls on other threads go there, too.
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
    """Puts a replacement in place; returns what takes it out again."""
    owner, name = row.target()
    thread, key = threading.get_ident(), (id(owner), name)
    with _lock:
        site = _sites.get(key)
        if site is None:
            site = _sites[key] = _Site(owner, name)
            site.install()
        layer = functools.partial(replacement, site.of_all[-1] if every_thread and site.of_all else site.top(thread))
        layers = site.of_all if every_thread else site.of_thread.setdefault(thread, [])
        layers.append(layer)

    def put_back() -> None:
        with _lock:
            layers.remove(layer)
            if not site.of_thread.get(thread, True):
                del site.of_thread[thread]
            if not site.of_thread and not site.of_all:
                site.remove()
                _sites.pop(key, None)

    return put_back


def is_called_from(module: types.ModuleType) -> bool:
    """Whether the call that a replacement was given comes from code of `module`. For the replacement itself to ask."""
    frame = sys._getframe(2)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals is vars(module)


@contextlib.contextmanager
def stock_torch() -> Iterator[None]:
    """While it is entered, functions that scopes on this thread replace are torch's: another backend compiles."""
    thread = threading.get_ident()
    with _lock:
        hidden = [(site, site.of_thread[thread]) for site in _sites.values() if thread in site.of_thread]
        for site, layers in hidden:
            layers.append(site.of_all[-1] if site.of_all else site.stock)
    try:
        yield
    finally:
        with _lock:
            for _, layers in hidden:
                layers.pop()


#: Values that scopes put into the place of torch's: what was there first, and those of the open scopes in order.
_values: dict[tuple[int, Any], tuple[Any, list[tuple[object, Any]]]] = {}


@contextlib.contextmanager
def _in_place(key: tuple[int, Any], before: Any, value: Any, put: Callable[[Any], None]) -> Iterator[None]:
    """While it is entered, a value is in place, on every thread; scopes end in any order."""
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
    """While it is entered, the attribute of `row` is `value`, on every thread; there need not have been one."""
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
    """While it is entered, the dict of `row` has these entries, on every thread.

    Args:
        table: the dict, where `row` names the function or the class that has it.
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
    """An entry for a table that is ``replacement(stock, ...)`` on the thread that makes it, and `stock` on others."""
    owner = threading.get_ident()

    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(stock, *args, **kwargs) if threading.get_ident() == owner else stock(*args, **kwargs)

    return call


def patch_for_good(row: Patch, replacement: Callable[..., Any]) -> None:
    """From now on calls of the function of `row`, which says that it is `lasting`, go to ``replacement(stock, ...)``."""
    assert row.lasting, row
    _put(row, replacement, every_thread=True)


def set_for_good(row: Patch, value: Any) -> None:
    """The attribute of `row`, which says that it is `lasting`, is `value` from now on."""
    assert row.lasting, row
    setattr(*row.target(), value)
