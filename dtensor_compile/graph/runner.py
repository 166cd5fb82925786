"""Steps on a graph, one after the other, all under one guard: what each takes, whether it may fail, what it took and
decided.

A `GraphStep` is data: a function on a graph, what it is given besides, when it applies, and whether numbers depend on
it. Where a step raises that they do not depend on, its change is taken back, a warning and a decision say so, and the
next one runs. Where they do, its exception goes on, with a note that names the step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from dtensor_compile.compat.aot.fx import SavedGraph, copy_of_graph, put_back
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import DTensorCompileError
from dtensor_compile.graph.nodes import has_even_shards, redistributions
from dtensor_compile.graph.rank_uniformity import sizes_differ

T = TypeVar("T")


class Policy(Protocol):
    """What `run_steps` has to know of a compilation; `dtensor_compile.options.Options` has the first three.

    Attributes:
        disable_passes, enable_passes: names of steps that do not run, and of those that run only where they are asked
            for.
        strict: what raises ends the compilation.
    """

    @property
    def disable_passes(self) -> Sequence[str]: ...

    @property
    def enable_passes(self) -> Sequence[str]: ...

    @property
    def strict(self) -> bool: ...


class StepContext(Protocol):
    """What steps are given besides the graph. It receives what they decide, and the seconds that each took."""

    @property
    def options(self) -> Policy: ...

    def decided(self, decisions: list[Decision]) -> None: ...

    def timed(self, name: str, seconds: float) -> None: ...


@dataclass(frozen=True)
class GraphStep:
    """One step on a graph.

    Attributes:
        run: changes a graph in place. Returns what it decided: a step that decides nothing changes nothing. A required
            one may return None.
        takes: the arguments of `run` after the graph, given the compilation.
        when: whether the step applies to a compilation.
        required: numbers depend on it.
        asked: it runs only where the user asks for it.
        reads: it changes no node, at most what is noted on nodes, so that nothing has to be taken back.
    """

    run: Callable[..., list[Decision] | None]
    takes: Callable[[Any], tuple[Any, ...]] = lambda this: ()
    when: Callable[[Any], bool] = lambda this: True
    required: bool = False
    asked: bool = False
    reads: bool = False

    @property
    def name(self) -> str:
        """Under which it can be left out, and which its decisions have."""
        return self.run.__name__


def run_steps(subject: torch.fx.Graph | torch.fx.GraphModule, steps: Sequence[GraphStep], this: StepContext) -> None:
    """Runs steps in order on a graph, or on the module of one.

    Ranks have to come to the same end; what steps may decide by where shards are uneven is said by `sizes_differ`, for
    all of them as the graph was before the first.

    Raises:
        Exception: what a required step raised, or any one where the options are strict.
    """
    graph = subject.graph if isinstance(subject, torch.fx.GraphModule) else subject
    saved: SavedGraph | None = None
    uneven = not all(map(has_even_shards, redistributions(graph)))
    for step in steps:
        if not applies(step, this):
            continue
        optional = not step.required and not this.options.strict
        if optional and not step.reads and saved is None:
            saved = copy_of_graph(graph)
        began = time.perf_counter()
        try:
            made = _result(step, subject, this, uneven)
        except Exception as error:
            if not optional:
                if not isinstance(error, DTensorCompileError):
                    error.add_note(f"dtensor_compile: raised by {step.name}")
                raise
            if not step.reads:
                assert saved is not None
                put_back(graph, saved)
                saved = None
            made = [dropped(step.name, error)]
        else:
            if not step.reads and (made or step.required):
                saved = None
        this.timed(step.name, time.perf_counter() - began)
        this.decided(made or [])


def _result(
    step: GraphStep, subject: torch.fx.Graph | torch.fx.GraphModule, this: StepContext, uneven: bool
) -> list[Decision] | None:
    """What a step decided; the graph that it has changed is one."""
    with sizes_differ(uneven):
        made = step.run(subject, *step.takes(this))
    if not step.reads and (made or not step.required):
        (subject.graph if isinstance(subject, torch.fx.GraphModule) else subject).lint()
    return made


def applies(step: GraphStep, this: StepContext) -> bool:
    """Whether a step runs in a compilation."""
    if (
        step.name in this.options.disable_passes
        and not step.required
        or step.asked
        and step.name not in this.options.enable_passes
    ):
        return False
    return step.when(this)


def attempt(name: str, this: StepContext, run: Callable[[], T], otherwise: T) -> T:
    """What `run` returns; `otherwise`, a warning and a decision where it raises and the options are not strict."""
    began = time.perf_counter()
    try:
        return run()
    except Exception as error:
        if this.options.strict:
            raise
        this.decided([dropped(name, error)])
        return otherwise
    finally:
        this.timed(name, time.perf_counter() - began)


def dropped(name: str, error: Exception) -> Decision:
    """Warns that a step raised and was dropped; the decision that says so."""
    reason = f"pass dropped: {type(error).__name__}: {error}"
    warnings.warn(f'dtensor_compile: {name}: {reason}; options={{"strict": True}} raises instead', stacklevel=3)
    return Decision(name, "", reason, left_alone=True)
