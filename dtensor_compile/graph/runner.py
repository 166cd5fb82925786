"""Runs steps on a graph in order, all under one guard, and records their decisions and seconds.

A `GraphStep` is data: a function on a graph, its other arguments, when it applies, and whether it is required for
correct results. If an optional step raises, its change is undone, a warning and a decision report it, and the next one
runs. The exception of a required step propagates, with a note that names the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from dtensor_compile.compat.aot.fx import SavedGraph, copy_of_graph, is_as_saved, put_back
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import DTensorCompileError
from dtensor_compile.graph.nodes import has_even_shards, redistributions
from dtensor_compile.graph.rank_uniformity import sizes_differ

T = TypeVar("T")


class Policy(Protocol):
    """The options of a compilation that `run_steps` needs; `dtensor_compile.options.Options` has the first three.

    Attributes:
        disable_passes, enable_passes: names of steps that do not run, and of opt-in steps that run.
        strict: whether any exception ends the compilation.
    """

    @property
    def disable_passes(self) -> Sequence[str]: ...

    @property
    def enable_passes(self) -> Sequence[str]: ...

    @property
    def strict(self) -> bool: ...


class StepContext(Protocol):
    """The context of steps besides the graph. It receives their decisions, and the seconds that each took."""

    @property
    def options(self) -> Policy: ...

    def decided(self, decisions: list[Decision]) -> None: ...

    def timing(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class GraphStep:
    """One step on a graph.

    Attributes:
        run: changes a graph in place and returns decisions; a step without decisions changes nothing. A required one
            may return None.
        takes: maps the compilation to the arguments of `run` after the graph.
        when: whether the step applies to a compilation.
        required: whether results are wrong without it.
        asked: whether it is opt-in.
        reads: it changes at most metadata of nodes, so that nothing has to be undone.
    """

    run: Callable[..., list[Decision] | None]
    takes: Callable[[Any], tuple[Any, ...]] = lambda this: ()
    when: Callable[[Any], bool] = lambda this: True
    required: bool = False
    asked: bool = False
    reads: bool = False

    @property
    def name(self) -> str:
        """Name by which it can be disabled, and which its decisions have."""
        return self.run.__name__


def run_steps(subject: torch.fx.Graph | torch.fx.GraphModule, steps: Sequence[GraphStep], this: StepContext) -> None:
    """Runs steps in order on a graph, or on the module of one.

    Ranks must make the same decisions; `sizes_differ` limits what these may depend on if shards are uneven, for all
    steps by the graph before the first.

    Raises:
        Exception: raised by a required step, or by any step if the options are strict.
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
        try:
            with this.timing(step.name):
                made = _result(step, subject, this, uneven, saved)
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
        this.decided(made or [])


def _result(
    step: GraphStep,
    subject: torch.fx.Graph | torch.fx.GraphModule,
    this: StepContext,
    uneven: bool,
    saved: SavedGraph | None,
) -> list[Decision] | None:
    """The decisions of a step, after it ran and changed the graph; `saved` is its state before, if that is known."""
    with sizes_differ(uneven):
        made = step.run(subject, *step.takes(this))
    if not step.reads and (made or not step.required):
        graph = subject.graph if isinstance(subject, torch.fx.GraphModule) else subject
        if saved is None or not is_as_saved(graph, saved):
            graph.lint()
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
    """The result of `run`; if it raises and the options are not strict, `otherwise`, with a warning and a decision."""
    try:
        with this.timing(name):
            return run()
    except Exception as error:
        if this.options.strict:
            raise
        this.decided([dropped(name, error)])
        return otherwise


def dropped(name: str, error: Exception) -> Decision:
    """Warns that a step raised and was dropped; returns the decision that says so."""
    reason = f"pass dropped: {type(error).__name__}: {error}"
    warnings.warn(f'dtensor_compile: {name}: {reason}; options={{"strict": True}} raises instead', stacklevel=3)
    return Decision(name, "", reason, left_alone=True)
