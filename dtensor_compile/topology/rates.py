"""Rates that a device achieves, by kind and size of the work.

A curve consists of points (size, rate) that `tools/measure_device.py` measures. Between two points a rate is
interpolated in the logarithms of both; below the smallest the line through the first two is extended, but smaller work
never takes longer; larger work has the rate of the largest. Times include the launch of the kernel.

Attention is measured with a causal mask, and torch's formulas count the masked elements: its rate is above that of
matmuls, and half as high without a mask.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

#: Kinds of work of an operator besides matmuls and loops.
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
#: Qualities of the rates of a device.
QUALITIES = ("measured", "guess")
#: Suffix of these kinds for attention without a mask.
UNMASKED = ", unmasked"


@dataclass(frozen=True)
class Curve:
    """A rate by size: points (size, rate) with sizes that grow."""

    points: tuple[tuple[float, float], ...]

    def rate(self, size: float) -> float:
        """The rate of work of that size."""
        if size >= self.points[-1][0]:
            return self.points[-1][1]
        place = max(1, bisect.bisect_left(self.points, (size, 0.0)))
        (small, slow), (large, fast) = self.points[place - 1 : place + 1]
        slope = math.log(fast / slow) / math.log(large / small)
        return slow * (size / small) ** min(1.0, slope)

    def seconds(self, size: float) -> float:
        """Seconds of work of that size."""
        return size / self.rate(size) if size else 0.0

    def times(self, factor: float) -> Curve:
        """The curve of a device that is faster by this factor."""
        return Curve(tuple((size, rate * factor) for size, rate in self.points))


def curve(points: Iterable[tuple[float, float]]) -> Curve:
    """The curve of points in any order: of several with one size, the geometric mean. Smaller work never takes longer,
    as it might by noise where launches dominate."""
    rates: dict[float, list[float]] = {}
    for size, rate in points:
        rates.setdefault(size, []).append(rate)
    found: list[tuple[float, float]] = []
    for size, known in sorted(rates.items(), reverse=True):
        rate = known[0] if len(known) == 1 else math.exp(sum(map(math.log, known)) / len(known))
        found.insert(0, (size, max(rate, size / (found[0][0] / found[0][1])) if found else rate))
    return Curve(tuple(found))


@dataclass(frozen=True)
class Achieved:
    """Rates that a device achieves.

    Attributes:
        matmul: operations per second of matmuls by their operations, by dtype: ``"bfloat16"`` (float16 too),
            ``"tf32"``, ``"float32"`` (without TF32).
        memory: bytes per second of elementwise kernels, by bytes read and written.
        attention, attention_backward: as `matmul`; that of TF32 is that of float32.
        basis: source of the rates, for reports.
        quality: ``"measured"``, or ``"guess"`` for rates in proportion to another device's.
    """

    matmul: Mapping[str, Curve]
    memory: Curve
    attention: Mapping[str, Curve] = field(default_factory=dict)
    attention_backward: Mapping[str, Curve] = field(default_factory=dict)
    basis: str = ""
    quality: str = "measured"

    def compute_seconds(self, operations: float, itemsize: int, tf32: bool, kind: str = "") -> float | None:
        """Seconds of floating-point operations; None for elements of other sizes than 2 and 4 bytes.

        Args:
            itemsize: bytes of an element.
            tf32: whether float32 matmuls use TF32.
            kind: `ATTENTION` or `ATTENTION_BACKWARD`, with `UNMASKED` if need be; else a matmul.
        """
        dtype = {2: "bfloat16", 4: "tf32" if tf32 else "float32"}.get(itemsize)
        if dtype is None:
            return None
        if kind.startswith(ATTENTION):
            curves = self.attention_backward if kind.startswith(ATTENTION_BACKWARD) else self.attention
            found = curves.get("float32" if dtype == "tf32" else dtype)
            if found is not None:
                masked = 1 if kind.endswith(UNMASKED) else 2  # twice the operations that are done
                return found.seconds(operations * 2 / masked)
        found = self.matmul.get(dtype)
        return None if found is None else found.seconds(operations)

    def scaled(self, compute: Callable[[str], float], memory: float, basis: str) -> Achieved:
        """The rates of a device in proportion to this one: matmuls of a dtype by ``compute(dtype)``."""

        def faster(curves: Mapping[str, Curve]) -> dict[str, Curve]:
            return {dtype: this.times(compute(dtype)) for dtype, this in curves.items()}

        return replace(
            self,
            matmul=faster(self.matmul),
            attention=faster(self.attention),
            attention_backward=faster(self.attention_backward),
            memory=self.memory.times(memory),
            basis=basis,
            quality="guess",
        )
