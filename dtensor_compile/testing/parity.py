"""One step eager and one compiled, from equal states, compared value by value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

#: Largest difference allowed, relative to the largest value of the tensor, per dtype in which it was computed.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Difference:
    """Where eager and compiled differ: what, how, and by how much (``nan`` where it is not a number that differs)."""

    what: str
    eager: Any
    compiled: Any
    relative: float = float("nan")

    def __str__(self) -> str:
        return f"{self.what}: eager {self.eager}, compiled {self.compiled} (relative difference {self.relative:.2e})"


def _facts(value: torch.Tensor) -> dict[str, Any]:
    facts = {"type": "DTensor" if isinstance(value, DTensor) else "Tensor", "dtype": value.dtype, "shape": tuple(value.shape)}
    facts["requires_grad"] = value.requires_grad
    facts["stride"] = tuple(value.stride())
    if isinstance(value, DTensor):
        facts["placements"] = value.placements
        facts["mesh"] = value.device_mesh
        facts["local shape"] = tuple(value.to_local().shape)
    return facts


def compare_values(what: str, eager: Any, compiled: Any, computed_in: torch.dtype | None = None) -> list[Difference]:
    """Every difference between two results: structure, type, placements, mesh, shape, stride, dtype, requires_grad, values."""
    flat_eager, spec_eager = pytree.tree_flatten(eager)
    flat_compiled, spec_compiled = pytree.tree_flatten(compiled)
    if spec_eager != spec_compiled:
        return [Difference(f"{what}: structure", spec_eager, spec_compiled)]
    differences: list[Difference] = []
    for i, (a, b) in enumerate(zip(flat_eager, flat_compiled)):
        name = what if len(flat_eager) == 1 else f"{what}[{i}]"
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if not (type(a) is type(b) and a == b):
                differences.append(Difference(name, a, b))
            continue
        fa, fb = _facts(a), _facts(b)
        wrong = [Difference(f"{name}.{key}", fa[key], fb.get(key)) for key in fa if fa[key] != fb.get(key)]
        differences += wrong
        if not wrong:
            differences += _compare_numbers(name, a, b, TOLERANCE.get(computed_in or a.dtype, 1e-5))
    return differences


def _compare_numbers(name: str, a: torch.Tensor, b: torch.Tensor, tolerance: float) -> list[Difference]:
    a = (a.to_local() if isinstance(a, DTensor) else a).detach()
    b = (b.to_local() if isinstance(b, DTensor) else b).detach()
    if torch.equal(a, b) or a.numel() == 0:
        return []
    if not (a.is_floating_point() or a.is_complex()):
        return [Difference(name, a, b)]
    if not torch.equal(torch.isnan(a), torch.isnan(b)):
        return [Difference(f"{name} (nan)", a, b)]
    a, b = torch.nan_to_num(a), torch.nan_to_num(b)
    relative = ((a - b).abs().max() / a.abs().max().clamp_min(1e-6)).item()
    if relative <= tolerance:
        return []
    index = (a - b).abs().flatten().argmax().item()
    return [Difference(f"{name} at flat index {index}", a.flatten()[index].item(), b.flatten()[index].item(), relative)]


Step = Callable[[Callable[..., Any]], Any]


def compare_steps(
    model: torch.nn.Module | Callable[..., Any],
    inputs: Sequence[Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    options: dict[str, Any] | None = None,
    backend: str = "dtensor",
    fullgraph: bool = True,
    dynamic: bool | None = None,
    calls: int = 2,
    computed_in: torch.dtype | None = None,
) -> list[Difference]:
    """Runs `model` on `inputs` eager and compiled and compares outputs, gradients, mutated inputs, buffers and parameters.

    Args:
        model: a module or a function over tensors and DTensors.
        inputs: positional arguments; copied for each run.
        loss: makes a scalar of the output, whose backward is compared too; None compares the forward alone.
        options, backend, fullgraph, dynamic: for ``torch.compile``.
        calls: how often both run, on the same inputs; gradients accumulate.
        computed_in: dtype in which the program computes, where that is coarser than the dtypes of its results (autocast).
    """
    results = []
    for compiled in (False, True):
        m = copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model
        args = [_fresh(x) for x in inputs]
        run = m
        if compiled:
            torch._dynamo.reset()
            run = torch.compile(m, backend=backend, fullgraph=fullgraph, dynamic=dynamic, options=options)
        outputs = []
        for _ in range(calls):
            torch.manual_seed(1)
            out = run(*args)
            outputs.append(out)
            if loss is not None:
                loss(out).backward()
        state = dict(m.state_dict(keep_vars=True)) if isinstance(m, torch.nn.Module) else {}
        results.append(
            {
                "output": outputs,
                "input": args,
                "input.grad": [x.grad for x in args if isinstance(x, torch.Tensor) and x.is_leaf],
                **{f"state.{k}": v for k, v in state.items()},
                **{f"grad.{k}": v.grad for k, v in state.items()},
            }
        )
    eager, compiled_ = results
    return [d for key in eager for d in compare_values(key, eager[key], compiled_[key], computed_in)]


def assert_parity(model: Any, inputs: Sequence[Any], **kwargs: Any) -> None:
    """`compare_steps`, and an AssertionError that lists the differences where there are any."""
    differences = compare_steps(model, inputs, **kwargs)
    if differences:
        raise AssertionError("compiled differs from eager:\n" + "\n".join(f"  {d}" for d in differences[:20]))


def _fresh(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    with torch.no_grad():
        return x.detach().clone().requires_grad_(x.requires_grad)
