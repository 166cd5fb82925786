"""Sharding decisions while tracing: by torch's rules or ours, cached across calls that differ in symbols only."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves, tree_map

from dtensor_compile.bounded_cache import BoundedCache
from dtensor_compile.compat.aot.symbolic.shapes import has_hint
from dtensor_compile.compat.apply_patches import ABSENT, patched_entries
from dtensor_compile.compat.distributed.device_meshes import real_mesh
from dtensor_compile.compat.dtensor.rules.operator_rules import (
    RULES,
    anywhere,
    aten,
    can_replicate,
    replicated,
    strategy_of,
    with_keywords,
)
from dtensor_compile.compat.dtensor.specs import meta_of
from dtensor_compile.compat.patches import patch


class _Thread(threading.local):
    """State of a thread.

    Attributes:
        on_fallback: called with each operator that has no rule and runs on replicated tensors.
        decided: torch's cache may hold decisions by our rules.
        lost: torch's cache may hold decisions that are never found again.
    """

    on_fallback: Callable[[str], None] | None = None
    decided: bool = False
    lost: bool = False


this_thread = _Thread()


#: Code that torch runs between the C++ lookup in its cache and the insertion into that same cache.
_BETWEEN_LOOK_AND_ENTRY = {
    method.__code__
    for method in (OpDispatcher.unwrap_to_op_info, OpDispatcher._propagate_op_sharding_dispatch_slow_path)
}


def _is_deciding() -> bool:
    """Whether this thread is in the middle of a decision; Dynamo may trace frames that torch calls there."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in _BETWEEN_LOOK_AND_ENTRY:
        frame = frame.f_back
    return frame is not None


def forget_decisions() -> None:
    """Clears this thread's cache of decisions, unless it is in the middle of one."""
    if not _is_deciding():
        torch._C._clear_DTensor_sharding_propagator_cache()
        this_thread.decided = this_thread.lost = False


def forget_our_decisions() -> None:
    """Clears the cache if it may hold a decision of ours; in the middle of a decision this is left to the next call."""
    if this_thread.decided or this_thread.lost:
        forget_decisions()


@contextlib.contextmanager
def fallback_reports(on_fallback: Callable[[str], None]) -> Iterator[None]:
    """While active, calls ``on_fallback(operator)`` when an operator without a rule runs on replicated tensors on this
    thread."""
    forget_our_decisions()  # a decision found in the cache is not reported
    before, this_thread.on_fallback = this_thread.on_fallback, on_fallback
    try:
        yield
    finally:
        this_thread.on_fallback = before


#: Decisions that torch's rules made in this process; torch's own cache is cleared when a trace begins
#: (`compat.aot.dtensor_observer`). Keyed by the operator, its rules, its arguments and their meshes.
_MOST_KNOWN = 1 << 14
_known: BoundedCache[Any, Any] = BoundedCache(_MOST_KNOWN)


#: Attribute of a shape env that holds the decisions for its symbolic sizes: it owns the symbols and their guards.
_KNOWN_OF_SYMBOLS = "_dtensor_compile_decisions"


def propagate(replicate: Callable[[], bool], stock: Callable[..., Any], self: Any, op_schema: OpSchema) -> Any:
    """The decision by torch's rules or ours, with real meshes in its specs."""
    op = op_schema.op
    rules = self.op_strategy_funcs.get(op), self.op_single_dim_strategy_funcs.get(op)
    leaves = tree_leaves((op_schema.args_schema, op_schema.kwargs_schema))
    symbolic = [number for value in leaves for number in _symbols(value)]
    known = decisions_for(symbolic)
    at = functools.partial(
        _at, symbolic=symbolic, sizes_are_arguments=any(isinstance(leaf, SYMBOLIC) for leaf in leaves)
    )
    try:
        key = op, *map(id, rules), _key(op_schema.args_schema), _key(op_schema.kwargs_schema)
        decision = None if known is None else known.get(key, (None, None))[1]
        here = None if decision is None else at(decision)
    except TypeError:  # an argument without a hash
        known = here = None
    if known is None:
        return _propagated(replicate, stock, self, op_schema)
    if here is None:
        before, this_thread.decided = this_thread.decided, False
        try:
            decision = _propagated(replicate, stock, self, op_schema)
            if not this_thread.decided and at(decision) is not None:
                meshes = [real_mesh(leaf.mesh) for leaf in leaves if isinstance(leaf, DTensorSpec)]
                known[key] = (rules, meshes), decision  # kept alive, as the key has their ids
        finally:
            this_thread.decided = this_thread.decided or before
        return copy.copy(decision)
    return here


def _at(decision: Any, symbolic: Sequence[Any], sizes_are_arguments: bool) -> Any:
    """A copy of a decision with its symbolic numbers replaced by the equal ones among the arguments; None if it has
    others.

    Symbolic numbers of a cached decision are nodes of another place in a graph, or of another graph. Sizes of the
    result get new nodes, unless arguments are sizes: those of the result are theirs then.
    """
    found, given = copy.copy(decision), {expression_of(number): number for number in symbolic}
    if not given:
        return found

    def here(value: Any) -> Any:
        if isinstance(value, DTensorSpec) and _symbols(value):
            meta, value = meta_of(value), copy.copy(value)
            sizes = (torch.Size(map(number_here, meta.shape)), tuple(map(number_here, meta.stride)))
            value.tensor_meta = TensorMeta(*sizes, meta.dtype)
            return value
        return number_here(value)

    def number_here(number: Any) -> Any:
        if not isinstance(number, SYMBOLIC):
            return number
        expression = expression_of(number)
        if expression not in given and of_result and isinstance(number, torch.SymInt) and has_hint(number):
            given[expression] = number.node.shape_env.create_symintnode(expression, hint=number.node.hint)
        return given[expression]

    schema, of_result = decision.redistribute_schema, False
    try:
        if schema is not None:
            found.redistribute_schema = OpSchema(
                schema.op, tree_map(here, schema.args_schema), tree_map(here, schema.kwargs_schema), schema.schema_info
            )
        of_result = not sizes_are_arguments
        found.output_spec = tree_map(here, decision.output_spec)
    except KeyError:
        return None
    return found


def decisions_for(symbolic: Sequence[Any]) -> dict[Any, Any] | None:
    """The cache for decisions on arguments with these symbolic numbers; None if such decisions are not cached.

    A decision with symbols adds guards to the shape env, which cover later decisions like it as long as the env lives.
    It is not cached where guards are suppressed, nor for unbacked symbols, which get assertions in the graph instead.
    """
    if not symbolic:
        return _known
    env = symbolic[0].node.shape_env
    if env._suppress_guards_tls() or any(free_unbacked_symbols(number) for number in symbolic):
        return None
    return vars(env).setdefault(_KNOWN_OF_SYMBOLS, BoundedCache(_MOST_KNOWN))


def _symbols(value: Any) -> list[Any]:
    """The symbolic numbers in an argument of an operator."""
    meta = value.tensor_meta if isinstance(value, DTensorSpec) else None
    numbers = (value,) if meta is None else (*meta.shape, *meta.stride)
    return [number for number in numbers if isinstance(number, SYMBOLIC)]


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _key(value: Any) -> Any:
    """Cache key of an argument of an operator.

    A number has its type, which may decide the dtype of the result; a symbolic one its expression. A spec has the
    identity of its real mesh, as an equal mesh may have lost its groups.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(value[name])) for name in sorted(value))
    if isinstance(value, DTensorSpec):
        meta = value.tensor_meta
        sizes = meta and (*map(expression_of, meta.shape), *map(expression_of, meta.stride), meta.dtype)
        return id(real_mesh(value.mesh)), value.placements, value.shard_order, sizes
    return type(value), expression_of(value)


def _propagated(replicate: Callable[[], bool], stock: Callable[..., Any], self: Any, op_schema: OpSchema) -> Any:
    decision = _decide(replicate, stock, self, op_schema)
    decision.output_spec = tree_map(_over_real_mesh, decision.output_spec)
    schema = decision.redistribute_schema
    if schema is not None:
        values, keywords = tree_map(_over_real_mesh, (schema.args_schema, schema.kwargs_schema))
        decision.redistribute_schema = OpSchema(schema.op, values, keywords, schema.schema_info)
    return decision


def _over_real_mesh(value: Any) -> Any:
    """A spec with the real mesh instead of a tracer's stand-in; other values as they are."""
    if not isinstance(value, DTensorSpec) or type(value.mesh) is DeviceMesh:
        return value
    real = copy.copy(value)
    real.mesh = real_mesh(value.mesh)
    return real


#: Owner of the tables of rules by operator.
_PROPAGATOR = "torch.distributed.tensor._sharding_prop:ShardingPropagator."


STRATEGIES = patch(_PROPAGATOR + "op_strategy_funcs", optional=True)


SINGLE_DIM_STRATEGIES = patch(_PROPAGATOR + "op_single_dim_strategy_funcs", optional=True)


def _decide(replicate: Callable[[], bool], stock: Callable[..., Any], self: Any, op_schema: OpSchema) -> Any:
    op_schema = _with_whole_slice(op_schema)
    op, layouts = op_schema.op, RULES.get(op_schema.op)
    if _is_whole_slice_backward(op_schema):
        layouts = anywhere
    elif op is aten.convolution_backward.default and op in self.op_single_dim_strategy_funcs:
        return _gradient_of_convolution(stock, self, op_schema)
    elif op in self.op_strategy_funcs or op in self.op_single_dim_strategy_funcs:
        return stock(self, op_schema)
    if layouts is None:
        try:
            return stock(self, op_schema)
        except NotImplementedError:
            composite = torch._C._dispatch_has_kernel_for_dispatch_key(
                op.name(), torch._C.DispatchKey.CompositeImplicitAutograd
            )
            if composite or not can_replicate(op) or not replicate():
                raise
        layouts = replicated
        if this_thread.on_fallback is not None:
            this_thread.on_fallback(str(op))
    this_thread.decided = True
    single = self.op_single_dim_strategy_funcs
    made: list[OpStrategy] = []

    def rule_of_op(schema: OpSchema) -> OpStrategy:
        made.append(strategy_of(layouts, schema))
        return made[-1]

    with contextlib.ExitStack() as stack:
        rule = {op: rule_of_op}
        stack.enter_context(patched_entries(STRATEGIES, rule, self.op_strategy_funcs))
        if op in single:  # 2.14 has a rule for `slice_backward`, which takes precedence
            stack.enter_context(patched_entries(SINGLE_DIM_STRATEGIES, {op: ABSENT}, single))
        decision = stock(self, op_schema)
    return with_keywords(decision, made[-1], op_schema) if made else decision


def _with_whole_slice(schema: OpSchema) -> OpSchema:
    """``slice(x, d, 0, sys.maxsize)`` as the equal ``slice(x, d, 0, x.shape[d])``, which torch recognizes as a full
    slice."""
    if schema.op is not aten.slice.Tensor or len(schema.args_schema) < 4:
        return schema
    arguments: tuple[Any, ...] = schema.args_schema  # a spec, then numbers
    spec, dim, start, end, *rest = arguments
    if start not in (None, 0) or not isinstance(end, int) or end < sys.maxsize:
        return schema
    return OpSchema(schema.op, (spec, dim, 0, spec.shape[dim], *rest), schema.kwargs_schema, schema.schema_info)


def _is_whole_slice_backward(schema: OpSchema) -> bool:
    """Whether this is the backward of a slice that takes all of its dim."""
    if schema.op is not aten.slice_backward.default:
        return False
    start, end, step = schema.args_schema[3:6]
    return start == 0 and step == 1 and isinstance(end, int) and end >= sys.maxsize


def _gradient_of_convolution(stock: Callable[..., Any], self: Any, schema: OpSchema) -> Any:
    """The decision by 2.14's rule, without placements for gradients that are not requested.

    The rule's replicated layout has no placement for such gradients, the others have one. On a mesh of several dims,
    with one sharding the batch and another replicated, such a gradient would have half a placement.
    """
    rule = self.op_single_dim_strategy_funcs[schema.op]
    asked = cast("Sequence[bool]", schema.args_schema[10])

    def layouts(*args: Any) -> list[list[Any]]:
        return [
            [None if i < len(asked) and not asked[i] else p for i, p in enumerate(layout)]
            for layout in rule.func(*args)
        ]

    ours = {schema.op: dataclasses.replace(rule, func=layouts)}
    with patched_entries(SINGLE_DIM_STRATEGIES, ours, self.op_single_dim_strategy_funcs):
        return stock(self, schema)


def expression_of(number: Any) -> Any:
    return number.node.expr if isinstance(number, SYMBOLIC) else number
