"""Factors of an operator, read off DTensor's own rules: how a sharding of one tensor carries over to the others.

A *factor* of an operator is a loop that it runs over: rows, columns and the contracted dim of a matmul are three.
Sharding a factor shards one dim of each tensor that has it. To find the factors, DTensor is asked about one argument at
a time, sharded along one dim, with all others replicated, over a mesh of one dim. If the argument stays sharded, that
dim is a factor; if not, it is none.

    mm(x[i,k], w[k,j]) -> y[i,j]     ask x: S(0)  ->  x: S(0), w: R,    y: S(0)       the factor i
                                     ask x: S(1)  ->  x: S(1), w: S(0), y: P          the factor k, contracted
                                     ask w: S(1)  ->  x: R,    w: S(1), y: S(1)       the factor j
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._pytree import tree_leaves, tree_map

from dtensor_compile.compat.dtensor.rules.operator_rules import inputs_taken


@dataclass(frozen=True)
class Factor:
    """
    Attributes:
        inputs, outputs: per tensor argument and per result the dim that belongs to the factor; None if it has none.
        summed: a result is a partial sum when the factor is sharded.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    summed: bool


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def facts(value: Any) -> Hashable:
    """Everything of an argument of an operator that its rule can depend on."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(facts, value))
    if isinstance(value, Mapping):
        return tuple((key, facts(item)) for key, item in value.items())
    return type(value), str(value)


def operator_factors(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    results: Sequence[torch.Tensor],
    mesh: DeviceMesh,
) -> list[Factor]:
    """The factors of one call that can be sharded over `mesh`.

    Args:
        args, kwargs: of the call; the tensors are plain ones of global shape.
        results: of the call, of global shape.
        mesh: has one dim; a dim of a tensor counts only if its size divides the size of the dim evenly.
    """
    tensors = tensor_leaves((args, kwargs))
    factors: dict[Factor, None] = {}
    for i, tensor in enumerate(tensors):
        for dim in range(tensor.ndim):
            if tensor.shape[dim] % mesh.size() == 0 and not any(f.inputs[i] == dim for f in factors):
                factor = _ask(op, args, kwargs, tensors, results, i, dim, mesh)
                if factor is not None:
                    factors[factor] = None
    return list(factors)


def _ask(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    index: int,
    dim: int,
    mesh: DeviceMesh,
) -> Factor | None:
    """The factor along `dim` of tensor argument `index`; None if the operator cannot run with that dim sharded."""
    asked = tensors[index]

    def spec(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placement: Placement = Shard(dim) if value is asked else Replicate()
        return DTensorSpec(mesh, (placement,), TensorMeta(value.shape, value.stride(), value.dtype))

    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op) or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    schema = OpSchema(op, tuple(tree_map(spec, tuple(args))), tree_map(spec, dict(kwargs)), schema_info=info)
    try:
        decision = propagator.propagate_op_sharding_non_cached(schema)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError, IndexError, TypeError):
        return None  # DTensor has no rule for this sharding
    inputs = inputs_taken(decision, schema)
    outputs = [leaf for leaf in tree_leaves(decision.output_spec) if isinstance(leaf, DTensorSpec)]
    if len(inputs) != len(tensors) or len(outputs) != len(results):
        return None
    cut = [_dim(leaf) for leaf in inputs]
    if cut[index] != dim:
        return None
    return Factor(tuple(cut), tuple(map(_dim, outputs)), any(leaf.placements[0].is_partial() for leaf in outputs))


def _dim(spec: DTensorSpec) -> int | None:
    placement = spec.placements[0]
    return placement.dim % spec.ndim if type(placement) is Shard else None


__all__ = ["Factor", "facts", "operator_factors", "tensor_leaves"]
