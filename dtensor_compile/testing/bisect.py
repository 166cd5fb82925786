"""Finds the part of the compilation that causes a difference: compiled equals eager when it is switched off.

The order is from the outside in: Inductor's kernels, the graph passes (all, then one by one), capture and lowering,
and, if stock torch differs too, its stages. Each try compiles the program again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dtensor_compile.passes import OPTIONAL, PASSES
from dtensor_compile.testing.parity import Settings


@dataclass(frozen=True)
class Culprit:
    """Result of a bisection.

    Attributes:
        what: one sentence that names the cause.
        differing: the simplest settings under which compiled still differs from eager.
        equal: the nearest settings under which it does not; None if there are none.
        tried: result of each try, in order.
    """

    what: str
    differing: Settings
    equal: Settings | None
    tried: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*(f"  {line}" for line in self.tried), self.what])


def bisect(differs: Callable[[Settings], bool], settings: Settings) -> Culprit:
    """Finds the cause of a difference.

    Args:
        differs: whether compiled differs from eager under given settings; on ranks it has to return the same on all of
            them.
        settings: settings under which it does.
    """
    tried: list[str] = []

    def equal(what: str, tried_settings: Settings) -> bool:
        is_equal = not differs(tried_settings)
        tried.append(f"{'equal  ' if is_equal else 'differs'}  {what}")
        return is_equal

    def found(what: str, differing: Settings, good: Settings | None) -> Culprit:
        return Culprit(what, differing, good, tuple(tried))

    now = settings
    if _ours(now):
        aten = now.with_options(kernels="aten")
        if now.backend == "dtensor" and (now.options or {}).get("kernels", "inductor") == "inductor":
            if equal('options={"kernels": "aten"}', aten):
                return found(
                    "Inductor's kernels make the difference: the same graph, operator by operator, is equal", now, aten
                )
            now = aten
        names = [name for name in pass_names(now) if name not in _disabled(now)]
        without = _without(now, names)
        if names and equal("without any graph pass", without):
            return _pass(names, now, without, equal, found)
        now = without if names else now
        stock = replace(now, backend="dtensor").with_options(capture=False, kernels="inductor", disable_passes=())
        if equal('options={"capture": False}', stock):
            return found(
                "capture or lowering of redistributions makes the difference: stock's way is equal", now, stock
            )
        now = stock
    for backend, what in (("aot_eager", "Inductor"), ("eager", "AOTAutograd")):
        stage = replace(settings, backend=backend, options=None)
        if equal(f'backend="{backend}"', stage):
            return found(f"{what} makes the difference, with stock torch as well", now, stage)
        now = stage
    return found(
        "Dynamo makes the difference, with stock torch as well (or the program itself does not repeat)", now, None
    )


def _pass(
    names: list[str],
    now: Settings,
    without: Settings,
    equal: Callable[[str, Settings], bool],
    found: Callable[..., Culprit],
) -> Culprit:
    for name in names:
        good = _without(now, [name])
        if equal(f"without {name}", good):
            return found(f"the graph pass {name} makes the difference", now, good)
    kept: list[str] = []  # several passes are wrong: find the first with which it differs
    for name in names:
        kept.append(name)
        some = _without(now, [n for n in names if n not in kept])
        if not equal(f"with {', '.join(kept)} alone", some):
            return found(f"several graph passes make a difference, the first of them {name}", some, without)
    return found("the graph passes make the difference, and not every time", now, without)


def _ours(settings: Settings) -> bool:
    return settings.backend in ("dtensor", "dtensor_aten") and (settings.options or {}).get("capture", True)


def pass_names(settings: Settings) -> list[str]:
    """The graph passes that run under these settings unless they are disabled, each once."""
    enabled = (settings.options or {}).get("enable_passes", ())
    return [name for name in dict.fromkeys(run.__name__ for run in PASSES) if name not in OPTIONAL or name in enabled]


def _disabled(settings: Settings) -> tuple[str, ...]:
    names = (settings.options or {}).get("disable_passes", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _without(settings: Settings, names: list[str]) -> Settings:
    return settings.with_options(disable_passes=(*_disabled(settings), *names))
