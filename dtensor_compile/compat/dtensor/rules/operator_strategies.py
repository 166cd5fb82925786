"""Strategies of an operator, read off DTensor's own rules: placements of its inputs with which it runs as it is, and
those of its results.

A rule is asked about one mesh dim at a time: everything replicated, then one input sharded along one of its dims or
partial, then all inputs partial. What it answers without redistributing that input is a strategy. On a mesh of
several dims, the strategies of the mesh dims combine freely, but for views: how a view of a shard is sharded depends on
the other mesh dims, so that the rule is asked about the whole mesh.

    mm(x[i,k], w[k,j])     R,R->R   S(0),R->S(0)   R,S(1)->S(1)   S(1),S(0)->P   P,R->P   R,P->P
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._pytree import tree_leaves, tree_map

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dtensor.rules.factors import tensor_leaves
from dtensor_compile.compat.dtensor.rules.operator_rules import inputs_taken
from dtensor_compile.compat.dtensor.specs import spec_as_of_views
from dtensor_compile.compat.dtensor.step_record import Placements, StepCall, Strategy
from dtensor_compile.compat.patches import needs, patch
from dtensor_compile.errors import one_line


class _Asked(threading.local):
    """The call about which this thread asks, and whether only for a strategy without redistributions."""

    call: StepCall | None = None
    as_it_is: bool = False


_asked = _Asked()
_RESULTS = patch(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached", "self op_schema"
)
_COSTS = patch("torch.distributed.tensor._ops.utils:redistribute_cost", "current_spec target_spec")


@needs(
    "results of recorded operators",
    _RESULTS,
    _COSTS,
    without="rules are asked in twice the time, as each answer runs the operator on fake tensors; in minutes from "
    "2.15 on, where each cost of a strided shard is a search",
    upstream="not reported: torch asks once for each operator of a program",
    remove_when="DTensor lists the strategies of an operator itself",
)
@contextlib.contextmanager
def results_known() -> Iterator[None]:
    """While active, sizes and strides of the results of a call that is asked about are taken from its recording, and
    nothing but what stays as it is costs nothing where only that is asked for: torch then chooses it, if it is there
    (`_select_min_cost_strategy`)."""

    def known(stock: Callable[..., Any], self: Any, op_schema: OpSchema) -> Any:
        call = _asked.call
        return stock(self, op_schema) if call is None or call.op is not op_schema.op else _metas(call.result)

    def cost(stock: Callable[..., Any], current: DTensorSpec, target: DTensorSpec) -> Any:
        if not _asked.as_it_is:
            return stock(current, target)
        same = current.placements == target.placements and current.shard_order == target.shard_order
        return 0.0 if same else 1.0

    with patched(_RESULTS, known), patched(_COSTS, cost):
        yield


def _metas(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return TensorMeta(result.shape, result.stride(), result.dtype)
    return type(result)(map(_metas, result)) if isinstance(result, (tuple, list)) else None


#: Of the gradients of norms, which tensors are statistics of the second, their input.
_STATISTICS = {
    torch.ops.aten.native_layer_norm_backward.default: (2, 3),
    torch.ops.aten._fused_rms_norm_backward.default: (2,),
}
#: What a rule raises for placements that it does not support.
_REFUSALS = (RuntimeError, NotImplementedError, AssertionError, ValueError, IndexError, TypeError, KeyError)


@dataclass(frozen=True)
class Refusal:
    """Why an operator does not take an input in some placement over a mesh dim.

    Attributes:
        input: number of the tensor among its inputs.
        placement: that it does not take.
        reason: what the rule raises, or does instead.
    """

    input: int
    placement: Placement
    reason: str


def ask_rule(call: StepCall, mesh: DeviceMesh, given: Sequence[Placements]) -> Strategy | str:
    """The strategy that DTensor's rule chooses for inputs with these placements, some of which it may redistribute; the
    reason if it refuses them."""
    placements = iter(given)

    def spec(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return spec_as_of_views(mesh, next(placements), TensorMeta(value.shape, value.stride(), value.dtype))

    propagator = DTensor._op_dispatcher.sharding_propagator
    op = call.op
    info = propagator.op_to_schema_info.get(op) or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    args: Any = tree_map(spec, call.args)
    schema = OpSchema(op, tuple(args), tree_map(spec, dict(call.kwargs)), schema_info=info)
    _asked.call = call
    try:
        decision = propagator.propagate_op_sharding_non_cached(schema)
    except _REFUSALS as error:
        return f"{type(error).__name__}: {one_line(error)}"
    finally:
        _asked.call = None
    inputs = _placements(inputs_taken(decision, schema))
    outputs = _placements(decision.output_spec)
    if len(inputs) != len(given) or len(outputs) != len(call.outputs):
        return "the rule says nothing of some of its tensors"
    if any(inputs[i] != inputs[1] for i in _STATISTICS.get(op, ())):
        return "the rule leaves statistics in other placements than their input"  # before 2.13, and computes with them
    return Strategy(inputs, outputs)


def _placements(value: Any) -> tuple[Placements, ...]:
    return tuple(tuple(leaf.placements) for leaf in tree_leaves(value) if isinstance(leaf, DTensorSpec))


def asked(call: StepCall, mesh: DeviceMesh, given: Sequence[Placements]) -> Strategy | None:
    """The strategy with exactly these inputs; None if DTensor's rule refuses them or redistributes one."""
    _asked.as_it_is = True
    try:
        found = ask_rule(call, mesh, given)
    finally:
        _asked.as_it_is = False
    return found if isinstance(found, Strategy) and found.inputs == tuple(given) else None


@dataclass(frozen=True)
class DimStrategies:
    """What a rule answers for a mesh of one dim.

    Attributes:
        found: the strategies; without a rule everything is replicated.
        refused: placements of single inputs that are in none of them.
        has_rule: whether DTensor has a rule for the operator.
    """

    found: list[Strategy]
    refused: list[Refusal]
    has_rule: bool


def strategies_on_one_dim(call: StepCall, mesh: DeviceMesh) -> DimStrategies:
    """The strategies over a mesh of one dim. A dim of a tensor counts only if its size divides evenly."""
    tensors, size = tensor_leaves((call.args, call.kwargs)), mesh.size()
    everywhere: list[Placements] = [(Replicate(),)] * len(tensors)
    replicated = asked(call, mesh, everywhere)
    outputs = ((Replicate(),),) * len(call.outputs)
    found: dict[Strategy, None] = {replicated or Strategy(tuple(everywhere), outputs): None}
    refused: list[Refusal] = []
    for i, tensor in enumerate(tensors if replicated else ()):
        for dim in range(tensor.ndim):
            cut: Placements = (Shard(dim),)
            if tensor.shape[dim] % size:
                refused.append(Refusal(i, cut[0], f"{tensor.shape[dim]} does not divide into {size} even shards"))
            elif not any(strategy.inputs[i] == cut for strategy in found):
                answer = ask_rule(call, mesh, [*everywhere[:i], cut, *everywhere[i + 1 :]])
                if isinstance(answer, Strategy) and answer.inputs[i] == cut:
                    found[answer] = None
                else:
                    refused.append(Refusal(i, cut[0], _why_not(answer, i)))
    for given in _partial_inputs(tensors) if replicated else ():
        answer = ask_rule(call, mesh, given)
        if isinstance(answer, Strategy) and answer.inputs == tuple(given):
            found[answer] = None
        else:
            i = next(i for i, (placement,) in enumerate(given) if placement.is_partial())
            refused.append(Refusal(i, given[i][0], _why_not(answer, i)))
    taken = {(i, placement) for strategy in found for i, (placement,) in enumerate(strategy.inputs)}
    left = [this for this in dict.fromkeys(refused) if (this.input, this.placement) not in taken]
    return DimStrategies(list(found), left, replicated is not None)


def _why_not(answer: Strategy | str, i: int) -> str:
    if isinstance(answer, str):
        return answer
    (instead,) = answer.inputs[i]
    return f"the rule redistributes it to {instead}"


def _partial_inputs(tensors: Sequence[torch.Tensor]) -> list[list[Placements]]:
    """Inputs of which one is partial, or all are."""
    summed = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]
    groups = [[i] for i in summed] + ([summed] if len(summed) > 1 else [])
    return [[(Partial() if i in group else Replicate(),) for i in range(len(tensors))] for group in groups]


__all__ = [
    "DimStrategies",
    "Placements",
    "Refusal",
    "Strategy",
    "ask_rule",
    "asked",
    "results_known",
    "strategies_on_one_dim",
]
