"""Frames that Dynamo does not compile: whether the program gets the error, and those that it has compiled as often as
its limits allow.

Dynamo decides so on each rank by itself: where guards fail on one rank only, that rank runs the frame in eager from
then on, and the others run a graph with other collectives.
"""

from __future__ import annotations

from torch._dynamo.eval_frame import FrameAction, FrameExecStrategy
from torch._dynamo.exc import FailOnRecompileLimitHit, RestartAnalysis, SkipFrame, Unsupported, UserError

from dtensor_compile.compat.patches import feature, hook

_LIMIT = feature(
    "ranks that reach the recompile limit together",
    hook("torch._dynamo.exc:FailOnRecompileLimitHit"),
    hook("torch._dynamo.eval_frame:FrameExecStrategy"),
    hook("torch._dynamo.exc:TorchDynamoException"),
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


def ends_program(error: BaseException, *, one_graph: bool) -> bool:
    """Whether the program gets an error that ends the compilation of a frame, instead of running it in eager.

    Args:
        one_graph: whether it is compiled with ``fullgraph=True``.
    """
    if isinstance(error, (RestartAnalysis, SkipFrame)):
        return False
    return one_graph or not isinstance(error, (Unsupported, UserError))


def run_in_eager(error: BaseException) -> None:
    """Changes an error that `reaches_recompile_limit` so that all later calls of the frame run in eager.

    Stock torch runs what it has compiled where its guards hold, which may be on some ranks only.
    """
    error.frame_exec_strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)  # type: ignore[attr-defined]
