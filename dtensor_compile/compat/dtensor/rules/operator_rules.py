"""Sharding rules for operators for which DTensor has none, or none that can be traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, OutputSharding
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


#: The placements on one mesh dim that an operator can run with: outputs first, then tensor arguments.
Layouts = list[list[Placement | None]]


def _on_dims(outputs: int, inputs: int, dims: Sequence[int]) -> Layouts:
    """All tensors sharded the same way on one of `dims`, or all replicated."""
    every: list[Placement | None] = [*map(Shard, dims), Replicate()]
    return [[placement] * (outputs + inputs) for placement in every]


def _attention(outputs: int, inputs: int, schema: OpSchema) -> Layouts:
    """Shards attention by batch and by head. A mask is sharded along that dim too, unless it lacks it or has size 1
    there."""
    layouts = _on_dims(outputs, inputs, (0, 1))
    for mask in schema.kwargs_strategy:
        for layout in layouts:
            dim = layout[0].dim if isinstance(layout[0], Shard) else None
            layout.append(Shard(dim) if dim is not None and mask.ndim == 4 and mask.shape[dim] != 1 else Replicate())
    return layouts


#: Operators without a rule in torch that work shard by shard: attention, and assertions along any dim.
RULES: dict[Any, Callable[[OpSchema], Layouts]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: functools.partial(_attention, 2, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: functools.partial(_attention, 3, 6),
    aten._assert_async.msg: lambda schema: _on_dims(0, 1, range(schema.args_strategy[0].ndim)),
    aten._assert_async.default: lambda schema: _on_dims(0, 1, range(schema.args_strategy[0].ndim)),
}


#: Operators that write one value into every element. A partial tensor is excluded: it would add the value up.
RULES |= {
    overload: lambda schema: _on_dims(1, 1, range(schema.args_strategy[0].ndim))
    for overload in (aten.fill_.Scalar, aten.fill.Scalar)
}
RULES |= {
    overload: lambda schema: [[*layout, Replicate()] for layout in _on_dims(1, 1, range(schema.args_strategy[0].ndim))]
    for overload in (aten.fill_.Tensor, aten.fill.Tensor)  # the value is a tensor without dims
}


def can_replicate(op: torch._ops.OpOverload) -> bool:
    """Whether an operator is functional and deterministic, so that replicated arguments give replicated results."""
    schema = op._schema
    return (
        not schema.is_mutable
        and not any(value.alias_info for value in schema.returns)
        and all(str(value.type) == "Tensor" for value in schema.returns)
        and torch.Tag.nondeterministic_seeded not in op.tags
    )


def strategy_of(layouts: Callable[[OpSchema], Layouts], schema: OpSchema) -> OpStrategy:
    """The strategy that torch expects of a rule: every combination of `layouts` over the mesh, with its cost.

    torch redistributes positional arguments only. A keyword tensor may be cut further than it is, without
    communication (`with_keywords` says how).

    Raises:
        RuntimeError: no combination accepts the keyword tensors as they are placed.
    """
    mesh = schema.get_mesh_from_args()
    outputs = len(schema.op._schema.returns)
    inplace = schema.is_inplace_op()
    strategy = expand_to_full_mesh_op_strategy(mesh, schema, layouts(schema), input_index=outputs, inplace_op=inplace)
    keywords = [value.strategies[0].output_spec.placements for value in schema.kwargs_strategy]
    if keywords:
        fits = [
            s
            for s in strategy.strategies
            if all(map(_cuts, keywords, [spec.placements for spec in (s.input_specs or ())[-len(keywords) :]]))
        ]
        if not fits:
            given = ", ".join(str(tuple(placements)) for placements in keywords)
            raise RuntimeError(
                f"{schema.op} cannot run with keyword tensors placed {given}: redistribute them to Replicate"
            )
        strategy = OpStrategy(fits)
    return strategy


def _cuts(now: Sequence[Placement], wanted: Sequence[Placement]) -> bool:
    """Whether each rank has what it needs to place a tensor otherwise."""
    return all(p == q or p.is_replicate() and q.is_shard() for p, q in zip(now, wanted))


def with_keywords(decision: OutputSharding, strategy: OpStrategy, schema: OpSchema) -> OutputSharding:
    """The decision, with keyword tensors placed as the strategy that was chosen has them.

    Args:
        decision: torch's, from among those of `strategy`.
        strategy: from `strategy_of`.
        schema: of the call.
    """
    names = [name for name, value in schema.kwargs_schema.items() if isinstance(value, DTensorSpec)]
    if not names:
        return decision
    made = [leaf.placements for leaf in tree_leaves(decision.output_spec) if isinstance(leaf, DTensorSpec)]
    for chosen in strategy.strategies:
        outputs = [leaf.placements for leaf in tree_leaves(chosen.output_specs) if isinstance(leaf, DTensorSpec)]
        if outputs != made:
            continue
        placed = dict(zip(names, (spec.placements for spec in (chosen.input_specs or ())[-len(names) :])))
        keywords = {name: _cut(value, placed.get(name)) for name, value in schema.kwargs_schema.items()}
        if keywords != schema.kwargs_schema:
            used = decision.redistribute_schema or schema
            decision.redistribute_schema = OpSchema(used.op, used.args_schema, keywords, used.schema_info)
            decision.needs_redistribute = True
        break
    return decision


class Cut(NamedTuple):
    """Specs of a keyword tensor in a redistribute schema: as it comes, which torch keeps for positional ones alone, and
    as the operator takes it."""

    before: DTensorSpec
    after: DTensorSpec


def _cut(value: Any, placements: Sequence[Placement] | None) -> Any:
    if not isinstance(value, DTensorSpec) or placements is None or tuple(placements) == value.placements:
        return value
    return Cut(value, DTensorSpec(value.mesh, tuple(placements), value.tensor_meta))


def inputs_taken(decision: OutputSharding, schema: OpSchema) -> list[DTensorSpec]:
    """Specs of an operator's tensors as it takes them, after the redistributions of the decision."""
    used = decision.redistribute_schema if decision.needs_redistribute else schema
    assert used is not None  # `needs_redistribute` implies it
    given = (used.kwargs_schema or schema.kwargs_schema).values()
    keywords = [value.after if isinstance(value, Cut) else value for value in given]
    return [leaf for leaf in tree_leaves((used.args_schema, keywords)) if isinstance(leaf, DTensorSpec)]


def replicated(schema: OpSchema) -> Layouts:
    """All tensors replicated."""
    return [[Replicate()] * (len(schema.op._schema.returns) + len(schema.args_strategy))]


def anywhere(schema: OpSchema) -> Layouts:
    """One tensor in, one out, with the same placement, whichever it is."""
    (value,) = schema.args_strategy
    return [[p, p] for p in {p: None for s in value.strategies for p in s.output_spec.placements}]


#: torch decomposes this one to find a rule, and then runs it on shards with the global number of rows.
RULES[aten.native_group_norm_backward.default] = replicated
