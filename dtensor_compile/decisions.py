"""`Decision`: the one record of a change to a program and its reason. Passes return it, reports show it, tests assert
on it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Something that was done to a program, or was not.

    Attributes:
        kind: the name of the pass or stage that decided (``"cancel_inverse_pairs"``, ``"capture"``).
        where: the user's line that caused it, ``file:line: code``; empty if unknown.
        reason: one sentence.
        before, after: the program text before and after.
        left_alone: whether a stage left this unchanged, handed it back to torch, or disabled itself, for `reason`.
        seconds, bytes: upper bound on the cost: estimated seconds of a step, bytes that are sent or copied; None if
            there is no estimate.
    """

    kind: str
    where: str
    reason: str
    before: str = ""
    after: str = ""
    left_alone: bool = False
    seconds: float | None = None
    bytes: int | None = None

    def __str__(self) -> str:
        change = f" {self.before} -> {self.after}" if self.before or self.after else ""
        return f"[{self.kind}]{change}: {self.reason}" + (f" ({self.where})" if self.where else "")
