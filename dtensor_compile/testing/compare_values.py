"""Comparison of two results: structure, types, placements, meshes, shapes, strides, dtypes, values; names the first
value that differs."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dtensor_compile.compat import pytree
from dtensor_compile.compat.dtensor.specs import MaskPartial

#: Largest difference allowed, relative to the largest finite value of the tensor, by the dtype in which it was
#: computed: sums may be in another order, but must have all terms.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
#: For complex numbers and all other dtypes.
_OTHERWISE = 1e-5


@dataclass(frozen=True)
class Difference:
    """A difference between eager and compiled.

    Attributes:
        what: name of the value, ``grad.0.weight``, and of its attribute, ``.placements``; for numbers the index of the
            largest difference.
        eager, compiled: both values.
        relative: size of the difference over the largest finite value of the tensor; ``nan`` if no number differs.
        tolerance: the allowed difference, and its source; empty if none was allowed.
        rank: the rank on which it was found.
    """

    what: str
    eager: Any
    compiled: Any
    relative: float = float("nan")
    tolerance: str = ""
    rank: int = 0

    def __str__(self) -> str:
        text = f"rank {self.rank}: {self.what}: eager {self.eager}, compiled {self.compiled}"
        if self.relative == self.relative:
            text += f", relative difference {self.relative:.2e}"
        return text + (f", allowed {self.tolerance}" if self.tolerance else "")


@dataclass(frozen=True)
class Allowed:
    """The allowed difference of numbers.

    Attributes:
        computed_in: dtype in which the program computes, if that is coarser than the dtypes of its results (autocast).
        relative: overrides `TOLERANCE`.
        terms: size of the terms of which the numbers are sums; one rounding of it is allowed, independent of the size
            of the numbers.
    """

    computed_in: torch.dtype | None = None
    relative: float | None = None
    terms: float = 0.0

    def of(self, dtype: torch.dtype) -> tuple[float, str]:
        """The tolerance for results of a dtype, and its source."""
        if self.relative is not None:
            return self.relative, f"{self.relative:g} (as given)"
        if self.computed_in is not None:
            value = TOLERANCE.get(self.computed_in, _OTHERWISE)
            return value, f"{value:g} (testing.compare_values.TOLERANCE, computed in {self.computed_in})"
        value = TOLERANCE.get(dtype, _OTHERWISE)
        return value, f"{value:g} (testing.compare_values.TOLERANCE of {dtype})"


def compare_values(
    what: str, eager: Any, compiled: Any, computed_in: torch.dtype | None = None, *, allowed: Allowed | None = None
) -> list[Difference]:
    """Every difference between two results, at most one for the numbers of each tensor."""
    allowed = allowed or Allowed(computed_in)
    flat_eager, spec_eager = pytree.tree_flatten(eager)
    flat_compiled, spec_compiled = pytree.tree_flatten(compiled)
    if spec_eager != spec_compiled:
        return [_difference(f"{what}: structure", spec_eager, spec_compiled)]
    differences: list[Difference] = []
    for i, (a, b) in enumerate(zip(flat_eager, flat_compiled)):
        name = what if len(flat_eager) == 1 else f"{what}[{i}]"
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if not (type(a) is type(b) and (a == b or _is_nan(a) and _is_nan(b))):
                differences.append(_difference(name, a, b))
            continue
        fa, fb = _facts(a), _facts(b)
        wrong = [_difference(f"{name}.{key}", fa[key], fb.get(key)) for key in fa if fa[key] != fb.get(key)]
        differences += wrong or _compare_numbers(name, a, b, allowed)
    return differences


def _is_nan(value: Any) -> bool:
    """Whether a value differs from itself, as NaN does in each type that has one."""
    return bool(operator.ne(value, value))


def _facts(value: torch.Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": "DTensor" if isinstance(value, DTensor) else "Tensor"}
    facts |= {"dtype": value.dtype, "shape": tuple(value.shape), "device": value.device.type}
    facts["requires_grad"] = value.requires_grad
    empty = not value.numel()  # the stride of a dim with a single element has no meaning
    facts["stride"] = tuple(None if empty or size == 1 else step for size, step in zip(value.shape, value.stride()))
    if isinstance(value, DTensor):
        # Each lookup has its own mask.
        facts["placements"] = tuple(str(p) if isinstance(p, MaskPartial) else p for p in value.placements)
        facts["mesh"] = value.device_mesh
        facts["local shape"] = tuple(value.to_local().shape)
    return facts


def _compare_numbers(name: str, a: torch.Tensor, b: torch.Tensor, allowed: Allowed) -> list[Difference]:
    a = (a.to_local() if isinstance(a, DTensor) else a).detach()
    b = (b.to_local() if isinstance(b, DTensor) else b).detach()
    if a.numel() == 0 or torch.equal(a, b):
        return []
    if not (a.is_floating_point() or a.is_complex()):
        return [_at(name, a, b, (a != b).flatten().int().argmax())]
    # Non-finite values have to be equal and at the same places, and do not count for the size of the other numbers.
    finite = a.isfinite() & b.isfinite()
    odd = ~finite & ~((a == b) | (a.isnan() & b.isnan()))
    if odd.any():
        return [_at(name, a, b, odd.flatten().int().argmax())]
    wide = torch.complex128 if a.is_complex() else torch.float64
    apart = (a.to(wide) - b.to(wide)).abs().masked_fill(~finite, 0)
    largest = a.to(wide).abs().masked_fill(~finite, 0).max().clamp_min(1e-6)
    relative = (apart.max() / largest).item()
    tolerance, source = allowed.of(a.dtype)
    rounding = torch.finfo(allowed.computed_in or a.dtype).eps * allowed.terms
    return (
        []
        if relative <= tolerance or apart.max().item() <= rounding
        else [_at(name, a, b, apart.flatten().argmax(), relative, source)]
    )


def _at(
    name: str, a: torch.Tensor, b: torch.Tensor, flat: torch.Tensor, relative: float = float("nan"), tolerance: str = ""
) -> Difference:
    """The difference at a place of the local tensors, given as a flat index."""
    index = tuple(int(i) for i in torch.unravel_index(flat, a.shape))
    where = "" if a.dim() == 0 else f" at local index {index}"
    return _difference(name + where, a[index].item(), b[index].item(), relative, tolerance)


def _difference(
    what: str, eager: Any, compiled: Any, relative: float = float("nan"), tolerance: str = ""
) -> Difference:
    return Difference(what, eager, compiled, relative, tolerance, dist.get_rank() if dist.is_initialized() else 0)
