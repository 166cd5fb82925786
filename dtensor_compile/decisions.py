"""`Decision`: the one record of what was done to a program and why. Passes return it, reports show it, tests assert on it."""

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
    """

    kind: str
    where: str
    reason: str
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        change = f" {self.before} -> {self.after}" if self.before or self.after else ""
        return f"[{self.kind}]{change}: {self.reason}" + (f" ({self.where})" if self.where else "")
