"""A training step that was made on the emulated GPU: what was logged of it, and where its parts begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dtensor_compile.forecast.memory_use import kind_of
from dtensor_compile.forecast.step_log import Allocation, StepLog
from dtensor_compile.forecast.training import Training
from dtensor_compile.graph.node_costs import Operation, SentCollective
from dtensor_compile.recording.recorder import Recording


class Point(NamedTuple):
    """A point of a log: numbers of requests and of changes of memory before it."""

    requests: int
    changes: int


@dataclass
class Marks:
    """The points at which the phases of the last step begin; None for one that nothing said of."""

    forward: Point
    backward: Point
    rest: Point
    end: Point
    loss: Point | None = None
    optimizer: Point | None = None

    def part_at(self, requests: int) -> str:
        """What runs in eager after so many requests."""
        begins = ((point.requests, text) for name, text in _PARTS.items() if (point := getattr(self, name)) is not None)
        return max((found for found in begins if found[0] <= requests), key=lambda found: found[0], default=(0, ""))[1]


#: What runs in eager in each phase, in their order.
_PARTS = {
    "optimizer": "the optimizer",
    "rest": "clipping of gradients",
    "backward": "eager operators of the backward pass",
    "loss": "the loss",
    "forward": "eager operators of the forward pass",
}


@dataclass(frozen=True)
class Observed:
    """A program that made its steps.

    Attributes:
        training, log, recording: the program, the work that the device was given, and the compilations.
        marks: of the last step.
        owned: kinds of the allocations that objects of the program own.
        operations, collectives: of the last step, one operation for each request.
    """

    training: Training
    log: StepLog
    recording: Recording
    marks: Marks
    owned: Mapping[Allocation, str]
    operations: Sequence[Operation]
    collectives: Sequence[SentCollective]

    def place(self, requests: int) -> tuple[str, str]:
        """The user's line, or what runs in eager, and the module of what ran after so many requests."""
        operation = self.operations[requests - self.marks.forward.requests]
        in_eager = self.log.requests[requests].graph < 0
        text = operation.where or (self.marks.part_at(requests) if in_eager and not operation.module else "")
        return text, operation.module

    def kind(self, this: Allocation) -> str:
        return kind_of(this, self.owned, self.marks.forward.requests, self.marks.backward.requests)
