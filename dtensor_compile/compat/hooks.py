"""Hooks: what a feature replaces or calls of torch under a private name, and what happens where torch has no such
thing.

    @needs("a feature", hook("torch._functorch.partitioners:functionalize_rng_ops", "joint_module ..."), without="this
    happens") @contextlib.contextmanager
    def place_random_states() -> Iterator[None]: ...

Where torch has no such function, or one with other parameters, the scope is not entered: the feature is missing, which
one warning says, with the name of the hook; the rest works. A feature is `essential` where numbers could be wrong
without it, or where a program asks for it by name: what would use it is an error then.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
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


def hook(place: str, *takes: str) -> Hook:
    """A `Hook`."""
    return Hook(place, takes)


@dataclass
class Feature:
    """Something that this package does by hooks.

    Attributes:
        name: what it is, as a row of a table.
        hooks: all that it needs.
        without: what happens where one is missing.
        essential: whether that is an error.
    """

    name: str
    hooks: tuple[Hook, ...]
    without: str
    essential: bool = False
    _known: dict[Hook, str | None] = field(default_factory=dict)
    _told: bool = False

    def __post_init__(self) -> None:
        """Looks at what is there already: later, scopes may have put functions of ours into the place of others. What
        is not imported yet is looked at when the feature is first used.
        """
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


def feature(name: str, *hooks: Hook, without: str, essential: bool = False) -> Feature:
    """A new `Feature`, one of `FEATURES`."""
    FEATURES[name] = made = Feature(name, hooks, without, essential)
    return made


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    """A scope in which all is as it is; it can decorate a function, as those of `needs` can."""
    yield


def needs(
    name: str, *hooks: Hook, without: str, essential: bool = False
) -> Callable[[Callable[P, AbstractContextManager[None]]], Callable[P, AbstractContextManager[None]]]:
    """A scope that is a `Feature`: it is entered only where that works. For functions that make context managers."""
    of = feature(name, *hooks, without=without, essential=essential)

    def decorate(scope: Callable[P, AbstractContextManager[None]]) -> Callable[P, AbstractContextManager[None]]:
        @functools.wraps(scope)
        def entered(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[None]:
            return scope(*args, **kwargs) if of.works() else _nothing()

        return entered

    return decorate
