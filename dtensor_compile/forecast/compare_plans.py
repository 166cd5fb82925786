"""Comparison of two plans, and limits that a plan must keep, as for reports (`report/compare_reports.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from dtensor_compile.forecast.step_plan import StepPlan
from dtensor_compile.report.compare_reports import Change, ReportComparison, parse_limit, seconds_text

BYTES = {"gib": 2**30, "mib": 2**20, "gb": 1e9, "mb": 1e6}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def compare_plans(base: StepPlan, now: StepPlan) -> ReportComparison:
    """Changes from one plan to another: memory as a whole and of each kind at the peak, parts of the step, and the
    collectives that came and went, by mesh dim and kind."""
    changes = [
        Change("memory with segments", base.memory.needed, now.memory.needed, "bytes"),
        Change("memory at the peak", base.memory.peak, now.memory.peak, "bytes"),
    ]
    held = [dict(zip(plan.memory.kinds, plan.memory.peak_of_kinds)) for plan in (base, now)]
    for kind in dict.fromkeys([*held[0], *held[1]]):
        changes.append(Change(f"  {kind}", held[0].get(kind, 0), held[1].get(kind, 0), "bytes"))
    for name, key in (("step", "step"), ("  compute", "compute"), ("  exposed", "exposed"), ("  idle", "idle")):
        changes.append(Change(name, getattr(base.time, key), getattr(now.time, key), "s"))
    changes.append(Change("tokens a second", base.tokens_per_second, now.tokens_per_second))
    before, after = (sum(row.bytes for row in plan.communication) for plan in (base, now))
    changes.append(Change("bytes sent", before, after, "bytes"))
    rows = [Counter(dict(_collectives(plan))) for plan in (base, now)]
    came, went = rows[1] - rows[0], rows[0] - rows[1]
    return ReportComparison(
        tuple(changes), *(tuple(f"{n} x {text}" for text, n in sorted(r.items())) for r in (came, went))
    )


def _collectives(plan: StepPlan) -> Iterator[tuple[str, int]]:
    for row in plan.communication:
        yield f"{row.kind}[{row.mesh_dim}]", row.count


@dataclass(frozen=True)
class PlanLimits:
    """Limits of a plan, in bytes and seconds; None: no limit. `texts` are those of the command line."""

    memory: float | None = None
    step: float | None = None
    texts: tuple[str, str] = ("", "")

    @classmethod
    def parse(cls, base: StepPlan | None, memory: str | None, step: str | None) -> PlanLimits:
        """Parses ``70GiB``, ``200ms``, ``+5%`` of the base.

        Raises:
            LimitError: a limit does not parse, or needs a base that is not given.
        """
        return cls(
            None if memory is None else parse_limit(memory, BYTES).of(base.memory.needed if base else None),
            None if step is None else parse_limit(step, _SECONDS).of(base.time.step if base else None),
            (memory or "", step or ""),
        )

    def exceeded(self, plan: StepPlan) -> list[str]:
        """The limits that a plan exceeds, a line each."""
        lines, (memory, step) = [], self.texts
        if self.memory is not None and plan.memory.needed > self.memory:
            needed, most = plan.memory.needed / 2**30, self.memory / 2**30
            lines.append(f"--max-memory {memory}: {needed:.2f} GiB, at most {most:.2f} GiB")
        if self.step is not None and plan.time.step > self.step * (1 + 1e-9):
            lines.append(f"--max-step {step}: {seconds_text(plan.time.step)}, at most {seconds_text(self.step)}")
        return lines
