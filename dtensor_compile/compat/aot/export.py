"""Traces a program over DTensors to operators on local tensors, with the dynamic dims of ``torch.export`` symbolic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.export.dynamic_shapes import Dim, _combine_args, _DimHintType, _tree_map_with_path
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dtensor_compile.compat.dtensor.specs import Spec


def dynamic_dims(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> list[frozenset[int]]:
    """Per leaf of the arguments, the dims that ``dynamic_shapes`` (as for ``torch.export.export``) makes dynamic."""
    found: list[frozenset[int]] = []

    def note(_path: Any, leaf: Any, spec: Any = None) -> Any:
        entries = spec.items() if isinstance(spec, dict) else enumerate(spec or ())
        found.append(
            frozenset(dim for dim, size in entries if _varies(size)) if isinstance(leaf, torch.Tensor) else frozenset()
        )
        return leaf

    combined: Any = _combine_args(function, tuple(args), dict(kwargs))
    if isinstance(dynamic_shapes, (tuple, list)):
        combined = type(dynamic_shapes)(combined.values())
    trees = (combined,) if dynamic_shapes is None else (combined, dynamic_shapes)
    _tree_map_with_path(note, *trees)
    return found


def _varies(size: Any) -> bool:
    return isinstance(size, type(Dim("d"))) or getattr(size, "type", None) in (_DimHintType.AUTO, _DimHintType.DYNAMIC)


def trace_to_local(
    function: Callable[..., Any], inputs: Sequence[Any], dims: Sequence[frozenset[int]]
) -> torch.fx.GraphModule:
    """The graph of aten operators that ``function(*inputs)`` runs on local tensors; DTensors exist only during the
    trace.

    Args:
        inputs: plain tensors and other values.
        dims: per input, the dims with a symbolic size.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(value: Any, varying: frozenset[int]) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        sizes = [DimDynamic.DYNAMIC if dim in varying else DimDynamic.STATIC for dim in range(value.dim())]
        return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    fakes = [fake(value, varying) for value, varying in zip(inputs, dims)]
    with torch.no_grad(), mode, enable_python_dispatcher():
        return make_fx(function, tracing_mode="real")(*fakes)


def wrap_local(local: torch.Tensor, spec: Spec) -> DTensor:
    """The DTensor around a local tensor; its global sizes follow from the local sizes if those are symbolic."""
    meta = spec.tensor_meta
    if meta is None or not all(isinstance(size, int) for size in local.shape):
        return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False)
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride)


def local_and_spec(tensor: DTensor) -> tuple[torch.Tensor, Spec]:
    """The local tensor, detached, and spec of a DTensor."""
    return tensor._local_tensor.detach(), tensor._spec


__all__ = ["dynamic_dims", "local_and_spec", "trace_to_local", "wrap_local"]
