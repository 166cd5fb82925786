"""Calls of equal blocks, found by their modules: one choice of placements serves all calls of a class.

Two calls are of one class if their modules' paths differ in indices only (``blocks.0.attention`` and
``blocks.7.attention``), their operators and arguments are equal, and they are the same in order among such calls of
their module and phase. Views that are made twice of the same tensor, which are one tensor in the recording, are of one
class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

from dtensor_compile.compat.dtensor.rules.factors import facts
from dtensor_compile.compat.dtensor.step_record import RecordedStep, StepCall

T = TypeVar("T", bound=Hashable)

_INDEX = re.compile(r"\.\d+(?=\.|$)")


def pattern(path: str) -> str:
    """A path with ``*`` in place of indices: ``blocks.3.attention`` -> ``blocks.*.attention``."""
    return _INDEX.sub(".*", path)


def by_pattern(values: Mapping[str, T]) -> dict[str, T]:
    """Values by path, with one row for equal blocks (``blocks.*.wq``) where all of them have the same."""
    kinds: dict[str, set[T]] = {}
    for path, value in values.items():
        kinds.setdefault(pattern(path), set()).add(value)
    return {pattern(path) if len(kinds[pattern(path)]) == 1 else path: value for path, value in values.items()}


def facts_of_call(call: StepCall) -> Hashable:
    """`facts` of an operator and its arguments."""
    return call.op, facts(call.args), facts(call.kwargs)


def classes_of_calls(step: RecordedStep) -> list[int]:
    """The class of each call, numbered in the order of their first calls."""
    seen: Counter[Hashable] = Counter()
    classes: dict[Hashable, int] = {}
    found: list[int] = []
    made: dict[tuple[int, ...], int] = {}
    for number, call in enumerate(step.calls):
        if call.outputs in made:
            found.append(made[call.outputs])
            continue
        same = call.module, call.phase, facts_of_call(call)
        seen[same] += 1
        varying = map(step.varying.get, (*call.inputs, *call.outputs))
        constraints = step.kept.get(number), *map(step.pinned.get, call.outputs), *varying
        key = pattern(call.module), call.phase, seen[same], facts_of_call(call), constraints
        found.append(classes.setdefault(key, len(classes)))
        made[call.outputs] = found[-1]
    return found


def classes_of_tensors(step: RecordedStep, names: Mapping[str, int]) -> dict[str, str]:
    """The name of the class of each named tensor: its pattern, if tensors of that pattern have equal facts."""
    kinds: dict[str, set[Hashable]] = {}
    for name, number in names.items():
        kinds.setdefault(pattern(name), set()).add(facts(step.tensors[number]))
    return {name: pattern(name) if len(kinds[pattern(name)]) == 1 else name for name in names}
