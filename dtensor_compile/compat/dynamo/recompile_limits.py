"""Frames that Dynamo does not compile: whether the program gets the error, and whether a recompile limit is the reason.

Dynamo decides this on each rank by itself: where guards fail on one rank only, that rank runs the frame in eager from
then on, and the others run a graph with other collectives.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any

import torch._dynamo.config
from torch._dynamo.eval_frame import FrameAction, FrameExecStrategy
from torch._dynamo.exc import FailOnRecompileLimitHit, RestartAnalysis, SkipFrame, Unsupported, UserError

from dtensor_compile.compat.patches import feature, hook

_LIMIT = feature(
    "ranks that reach the recompile limit together",
    hook("torch._dynamo.exc:FailOnRecompileLimitHit"),
    hook("torch._dynamo.eval_frame:FrameExecStrategy"),
    hook("torch._dynamo.exc:TorchDynamoException"),
    hook("torch._dynamo.convert_frame:ConvertFrameBox.error_on_graph_break"),
    without="a rank that reaches it alone runs in eager, and hangs with the others",
    essential=True,
    upstream="not reported: torch's own graphs call the collectives that eager calls, as long as nothing reorders them",
    remove_when="ranks agree on whether they compile a frame",
)


def reaches_recompile_limit(error: BaseException) -> bool:
    """Whether an error that ends the compilation of a frame says that a limit on recompilations is reached."""
    if not _LIMIT.works():
        return False
    strategy = getattr(error, "frame_exec_strategy", None)
    return isinstance(error, FailOnRecompileLimitHit) or (
        strategy is not None and strategy.cur_action == FrameAction.RUN_ONLY
    )


class Fate(enum.Enum):
    """The outcome for a frame that is not compiled: the program gets the error; it runs in eager, as the program asks
    for with ``torch._dynamo.config.suppress_errors``; or Dynamo goes on, with a graph break for instance."""

    RAISES, SUPPRESSED, GOES_ON = range(3)


def fate_of_frame(error: BaseException, *, one_graph: bool) -> Fate:
    """Dynamo's handling of an error that ends the compilation of a frame.

    Args:
        one_graph: whether it is compiled with ``fullgraph=True``.
    """
    if isinstance(error, (RestartAnalysis, SkipFrame)):
        return Fate.GOES_ON
    if one_graph:
        return Fate.RAISES
    if isinstance(error, (Unsupported, UserError)):
        return Fate.GOES_ON
    return Fate.SUPPRESSED if torch._dynamo.config.suppress_errors else Fate.RAISES


@contextlib.contextmanager
def never_suppressed(box: Any) -> Iterator[None]:
    """While active, an error that leaves the context reaches the program, whatever ``suppress_errors`` says.

    Args:
        box: the ``ConvertFrameBox`` in which ``_compile`` reports whether graph breaks are errors; None where the
            caller raises everything.
    """
    try:
        yield
    except Exception:
        if box is not None:
            box.error_on_graph_break = True  # of this compilation alone: each one writes it
        raise


def run_in_eager(error: BaseException) -> None:
    """Changes an error that ends the compilation of a frame so that all later calls of the frame run in eager.

    Stock torch runs compiled code where its guards hold, which may be on some ranks only.
    """
    error.frame_exec_strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)  # type: ignore[attr-defined]
