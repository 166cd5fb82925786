"""The table of patches: the private names of torch that this package replaces or calls, and why.

A row stands beside its replacement, in the declaration of the feature that needs it:

    PLACE = patch("torch._functorch.partitioners:functionalize_rng_ops", "joint_module fw_module ...")

    @needs("a feature", PLACE, hook("torch._functorch.partitioners:is_opaque_node", "node"), without="this happens",
           upstream="not reported: ...", remove_when="torch does this itself")
    @contextlib.contextmanager
    def place_random_states() -> Iterator[None]:
        def place(stock, joint_module, fw_module, *rest): ...

        with patched(PLACE, place):
            yield

Only `compat.apply_patches` assigns to anything of torch's.

If torch lacks the function, or has one with other parameters, the scope is not entered: one warning names the feature
and the function, and everything else works. A feature is `essential` if numbers could be wrong without it, or if a
program asks for it by name: using it is an error then. ``docs/patches.md`` is generated from `FEATURES`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch.utils._config_module import ConfigModule

from dtensor_compile.compat.missing_names import MISSING
from dtensor_compile.compat.release import SUPPORTED, is_untried
from dtensor_compile.errors import UnsupportedTorchError

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
#: The result of a function under ``contextlib.contextmanager``; it can decorate a function, too.
Scope: TypeAlias = contextlib._GeneratorContextManager[None]


class MissingHookWarning(UserWarning):
    """A feature of this package does not work with the installed torch release."""


@dataclass(frozen=True)
class Hook:
    """One function, method, class or table of torch's.

    Attributes:
        place: ``module:name`` or ``module:Class.name``; for a config module, the name of a setting.
        takes: parameter lists that we know how to call, names separated by blanks; ``...`` at the end allows more.
            Empty: it is enough that the name exists.
    """

    place: str
    takes: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """The problem with the hook in the installed release, as the end of a sentence; None if there is none."""
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
            return None  # C++ code has no signature
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
    """The object at ``module:name``; None if the installed release has no such thing."""
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
        return found if found is not None else importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module}.{name}".startswith(missing.name):
            raise  # the module is there, and lacks something of its own
        return None


@dataclass(frozen=True)
class Patch(Hook):
    """A `Hook` that a function of ours replaces, while a scope is active or (`lasting`) for good.

    Attributes:
        lasting: it is never undone.
        optional: torch may lack it: nothing is replaced then; a value is added, and removed again.
    """

    lasting: bool = False
    optional: bool = False

    def problem(self) -> str | None:
        return None if self.optional else super().problem()

    def is_there(self) -> bool:
        """Whether the installed release has it, whatever its parameters."""
        owner, name = self.target()
        absent = object()
        return inspect.getattr_static(owner, name, absent) is not absent

    def target(self) -> tuple[Any, str]:
        """The owner of the function, and its name there.

        Raises:
            ImportError, AttributeError: the installed release has no such thing.
        """
        module, _, path = self.place.partition(":")
        *owners, name = path.split(".")
        return functools.reduce(getattr, owners, importlib.import_module(module)), name


def hook(place: str, *takes: str) -> Hook:
    """A function, method, class or table of torch's that is called or read, but not replaced."""
    return Hook(place, takes)


def patch(place: str, *takes: str, lasting: bool = False, optional: bool = False) -> Patch:
    """A function, method, class or table of torch's that is replaced."""
    return Patch(place, takes, lasting, optional)


@dataclass
class Feature:
    """A capability of this package that depends on hooks.

    Attributes:
        name: as shown in docs and warnings.
        hooks: all that it needs.
        without: the consequence if one is missing.
        essential: whether a missing hook is an error.
        upstream: the issue or pull request in torch's repository, or ``not reported: `` and why.
        remove_when: the condition on torch under which the patches can be removed.
        scope: the function that does it, ``module:function``, and the first paragraph of its docstring.
        module: the module that declares it, whose imports from torch it needs, too.
    """

    name: str
    hooks: tuple[Hook, ...]
    without: str
    essential: bool = False
    upstream: str = ""
    remove_when: str = ""
    scope: tuple[str, str] = ("", "")
    module: str = ""
    _known: dict[Hook, str | None] = field(default_factory=dict)
    _warned: bool = False

    def __post_init__(self) -> None:
        """Checks hooks of imported modules now, because scopes may replace some later; others when the feature is first
        used.

        Raises:
            TypeError: a feature with patches lacks `upstream` or `remove_when`.
        """
        if any(isinstance(hook, Patch) for hook in self.hooks) and not (self.upstream and self.remove_when):
            raise TypeError(f"{self.name}: a feature with patches needs `upstream` and `remove_when`")
        self._known = {hook: hook.problem() for hook in self.hooks if hook.place.partition(":")[0] in sys.modules}

    def done_by(self, function: F) -> F:
        """Decorator: records `function` as the one that provides the feature."""
        sentence = " ".join((function.__doc__ or "").partition("\n\n")[0].split())
        self.scope, self.module = (f"{function.__module__}:{function.__qualname__}", sentence), function.__module__
        return function

    def problems(self) -> list[str]:
        """The problems with the hooks in the installed release; empty if there are none."""
        for hook in self.hooks:
            if hook not in self._known:
                self._known[hook] = hook.problem()
        problems = [problem for hook in self.hooks if (problem := self._known[hook]) is not None]
        return problems + [f"has no {place}" for place in MISSING.get(self.module, ())]

    def works(self) -> bool:
        """Whether the installed release has all hooks; warns the first time if not.

        Raises:
            UnsupportedTorchError: a hook is missing and the feature is essential.
        """
        problems = self.problems()
        if not problems:
            return True
        text = (
            f"dtensor_compile: {self.name}: torch {torch.__version__} {'; '.join(problems)}. Without it {self.without}"
        )
        if self.essential:
            raise UnsupportedTorchError(text)
        if not self._warned:
            warnings.warn(text, MissingHookWarning, stacklevel=3)
        self._warned = True
        return False


#: All features that need hooks, by name.
FEATURES: dict[str, Feature] = {}


def feature(
    name: str, *hooks: Hook, without: str, essential: bool = False, upstream: str = "", remove_when: str = ""
) -> Feature:
    """Creates a `Feature` and registers it in `FEATURES`."""
    module = sys._getframe(1).f_globals["__name__"]  # `done_by` sets it for a scope
    FEATURES[name] = made = Feature(name, hooks, without, essential, upstream, remove_when, module=module)
    return made


def warn_of_untried_release() -> None:
    """Warns if the installed release is not a supported one; names it, and the features that are off.

    Called once everything that declares features is imported.
    """
    if not is_untried():
        return
    off = {of.name: problems for of in FEATURES.values() if (problems := of.problems())}
    text = "; ".join(f"{name} ({', '.join(problems)})" for name, problems in off.items()) or "none"
    warnings.warn(
        f"dtensor_compile was not tried with torch {torch.__version__}; it was with {', '.join(SUPPORTED)}. Features "
        f"that are off because torch has changed: {text}. DTENSOR_COMPILE_TORCH=known makes an error of this.",
        MissingHookWarning,
        stacklevel=2,
    )
    for name in off:
        FEATURES[name]._warned = True


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    """A scope that changes nothing."""
    yield


def needs(
    name: str, *hooks: Hook, without: str, essential: bool = False, upstream: str = "", remove_when: str = ""
) -> Callable[[Callable[P, Scope]], Callable[P, Scope]]:
    """Declares a `Feature` and makes the decorated context manager enter only if it works; a no-op otherwise."""
    of = feature(name, *hooks, without=without, essential=essential, upstream=upstream, remove_when=remove_when)

    def decorate(scope: Callable[P, Scope]) -> Callable[P, Scope]:
        of.done_by(scope)

        @functools.wraps(scope)
        def entered(*args: P.args, **kwargs: P.kwargs) -> Scope:
            return scope(*args, **kwargs) if of.works() else _nothing()

        return entered

    return decorate
