"""`Decision`: the one record of what was done to a program and why. Passes return it, reports show it, tests assert on
it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One thing that was done, or was not.

    Attributes:
        kind: what was decided, by the name of the pass or stage (``"cancel_inverse_pairs"``, ``"capture"``).
        where: the user's line that caused it, ``file:line: code``; empty where none is known.
        reason: why, in one sentence.
        before, after: what stood there, in text form.
        left_alone: a stage left this as it was, handed it back to torch, or switched itself off; `reason` says why.
        seconds, bytes: what that costs at most: estimated seconds of a step, bytes that are sent or copied; None where
            no estimate exists.
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
