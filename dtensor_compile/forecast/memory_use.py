"""Memory of a device over a training step, by kind of content.

Input: the allocations of a `StepLog`, and the points of the step's phases. Output: for each point of the step the bytes
of each kind, and the peak with the allocations live at it.

    parameters             and buffers of the model
    gradients              what ``.grad`` of a parameter is
    optimizer states
    gathered parameters    computed from parameters alone: gathered over ranks, cast to another dtype
    collectives            what collectives read and write, as far as it is nothing of the above
    saved activations      what lives where the backward pass begins, and was made in the forward pass
    inputs
    temporaries            everything else
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtensor_compile.forecast.step_log import Allocation

KINDS = (
    "parameters", "gradients", "optimizer states", "gathered parameters", "collectives", "saved activations", "inputs",
    "temporaries",
)  # fmt: skip


#: Number of requests before it, an allocation, and whether it begins (`StepLog.changes`).
Change = tuple[int, Allocation, bool]


@dataclass(frozen=True)
class Use:
    """Bytes of each of `KINDS` after a number of requests."""

    requests: int
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def kind_of(this: Allocation, known: Mapping[Allocation, str], forward: int, backward: int) -> str:
    """The kind of an allocation.

    Args:
        known: kinds of allocations that objects of the program have.
        forward, backward: number of requests before the forward and before the backward pass.
    """
    if this in known:
        return known[this]
    if this.of_parameters:
        return "gathered parameters"
    if this.born >= forward and this.born < backward and (this.died is None or this.died > backward):
        return "saved activations"
    return "collectives" if this.of_collective else "temporaries"


@dataclass(frozen=True)
class StepUse:
    """Memory over a step.

    Attributes:
        uses: at its begin, and after each change.
        peak: the first of them at which most is held.
        held: the allocations that are held then.
        blocks: the allocator's blocks in order, as `allocator.reserved_by` takes them: first those that are held where
            the step begins.
    """

    uses: list[Use]
    peak: Use
    held: list[Allocation]
    blocks: list[tuple[int, int]]


def use_of_step(changes: Sequence[Change], kind_of: Callable[[Allocation], str], begin: int, end: int) -> StepUse:
    """Memory over the step between two of the `changes` of a program.

    Args:
        kind_of: returns the kind of an allocation.
        begin, end: number of changes before and after the step.
    """
    before: dict[Allocation, None] = {}
    for _, this, begins in changes[:begin]:
        if begins:
            before[this] = None
        else:
            del before[this]
    numbers, number = itertools.count(), -1
    held = {this: next(numbers) for this in before}
    blocks = [(number, this.bytes) for this, number in held.items()]
    now = dict.fromkeys(KINDS, 0)
    for this in held:
        now[kind_of(this)] += this.bytes
    uses, at_peak = [Use(changes[begin - 1][0] if begin else 0, dict(now))], list(held)
    peak = uses[0]
    for requests, this, begins in changes[begin:end]:
        now[kind_of(this)] += this.bytes if begins else -this.bytes
        if begins:
            held[this] = number if this.reuses else next(numbers)
        else:
            number = held.pop(this)
        if this.reused and not begins:
            continue  # the same memory is about to get its new content
        if not begins:
            blocks.append((number, 0))
        elif not this.reuses:
            blocks.append((held[this], this.bytes))
        uses.append(Use(requests, dict(now)))
        if uses[-1].total > peak.total:
            peak, at_peak = uses[-1], list(held)
    return StepUse(uses, peak, at_peak, blocks)
