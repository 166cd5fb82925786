"""Training steps of a script that runs as it is, until it has made as many as are needed.

Input: a script and its arguments, on a simulated rank and an emulated GPU. Output: a `Training` that knows its
optimizers. A step ends where the first optimizer that makes one has made it again. Values of tensors on the GPU that
the script reads, as it does to print a loss, are made up; data that it loads is real until it is moved to the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dtensor_compile.forecast.step_log import StepLog, users_line
from dtensor_compile.forecast.training import OnPhase, StepSettings, Training
from dtensor_compile.offline.emulated_device import EmulatedDevice
from dtensor_compile.report.target import TargetError, TargetProgram, run_script

#: Steps that a script makes: optimizers make their states in the first.
STEPS = 3


class ScriptLog(StepLog):
    """The log of a script, which gets 0, or False, where it reads a value.

    Attributes:
        read_at: the user's lines that got one, in order.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__(device)
        self.read_at: dict[str, None] = {}

    def read(self, tensor: torch.Tensor) -> bool | int | float | None:
        self.read_at[users_line()] = None
        value: bool | int | float = torch.zeros((), dtype=tensor.dtype, device="cpu").item()
        return value


class _Enough(BaseException):
    """Ends the script; no handler of the script catches it by accident."""


def script_training() -> Training:
    """The training of a script, before it runs."""

    def nothing() -> None:
        pass

    return Training(TargetProgram(nothing), nothing, StepSettings(loss="the script's", optimizer="the script's"))


def run_steps(script: str, arguments: Sequence[str], training: Training, on_phase: OnPhase) -> None:
    """Runs a script until it has made `STEPS` steps.

    Args:
        training: whose optimizers are watched (`Training.optimizers_watched`).
        on_phase: called with ``"forward"`` where a step begins, and with ``"end"`` where it ends.

    Raises:
        TargetError: the script raises, or ends before.
    """
    made = 0

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal made
        if optimizer is not training.optimizers[0]:
            return
        made += 1
        on_phase("end")
        if made == STEPS:
            raise _Enough
        on_phase("forward")

    handle = register_optimizer_step_post_hook(stepped)
    try:
        on_phase("forward")
        run_script(script, arguments)
    except _Enough:
        return
    finally:
        handle.remove()
    raise TargetError(
        f"{script} made {made} steps of an optimizer, and {STEPS} are needed: give it arguments with which it makes as "
        f"many, or return the model and its inputs from a function and name that, {script}:function"
    )
