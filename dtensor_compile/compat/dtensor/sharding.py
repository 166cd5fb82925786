"""DTensor's rules for operators, while our backend traces: those that torch lacks, and those that cannot be traced as
they are.

`sharding_rules` is entered by the scope in which Dynamo traces for our backend (`compat.dynamo.tracing`), and left with
it. Inside:

- The offset of a shard comes from integers, where torch reads it out of a tensor, which has no values while tracing;
  that of a strided shard out of a tensor that has.
- A slice that takes all of a dim is one also where the size of the dim is symbolic (`x[:, 1:3]` slices dim 0 up to
  ``sys.maxsize``).
- A flattened sharded dim fixes the sizes before it, as its strided shard needs a number.
- A symbolic number stays symbolic when an operator looks for its rule.
- A spec of which a stride alone is symbolic (some columns of a matrix, the number of which varies) is looked up by what
  object it is.
- ``one_hot`` compares with numbers that are the same on every rank.
- An operator in `RULES` follows the rule there; one that torch has no rule for runs on replicated tensors (`fallback`).
- A row-wise lookup has a mask of its own.
- A view with strided shards can be taken apart and put together.
- A rank outside of a mesh decides as the ranks in it do: to torch all redistributions cost nothing there, so that it
  would take the first placements that an operator can have.

torch keeps decisions in a cache, which traced and eager calls share. A decision by a rule of ours must not reach an
eager call: after one, the cache is emptied where the scope ends. Nor must the objects that stand for meshes while
AOTAutograd traces: decisions name the meshes themselves.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import _utils as shard_utils
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OpStrategy
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor._ops import utils as op_utils
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false
from torch.utils._pytree import tree_leaves, tree_map

from dtensor_compile.bounded_cache import BoundedCache
from dtensor_compile.compat.aot.shapes import has_hint
from dtensor_compile.compat.distributed.device_meshes import mesh_dims, rank_map, real_mesh
from dtensor_compile.compat.dtensor.specs import spec_of_parts
from dtensor_compile.compat.dynamo.constant_objects import OPAQUE
from dtensor_compile.compat.dynamo.settings import implicit_replication
from dtensor_compile.compat.dynamo.tracing import STANDS_FOR
from dtensor_compile.compat.hooks import hook, if_there, needs

aten = torch.ops.aten

#: Per mesh dim, the placements that an operator can work with: outputs first, then tensor arguments.
Layouts = list[list[Placement | None]]


def _on_dims(outputs: int, inputs: int, dims: Sequence[int]) -> Layouts:
    """All tensors sharded the same way on one of `dims`, or all replicated."""
    return [[Shard(d)] * (outputs + inputs) for d in dims] + [[Replicate()] * (outputs + inputs)]


def _attention(outputs: int, inputs: int, schema: OpSchema) -> Layouts:
    """Attention by batch and by head. A mask that has that dim is cut with it, one that has not, or of size 1, is
    whole.
    """
    layouts = _on_dims(outputs, inputs, (0, 1))
    for mask in schema.kwargs_strategy:
        for layout in layouts:
            dim = layout[0].dim if isinstance(layout[0], Shard) else None
            has = dim is not None and mask.ndim == 4 and mask.shape[dim] != 1
            layout.append(Shard(dim) if has else Replicate())
    return layouts


#: Operators without a rule in torch that work shard by shard: attention, checks by any dim.
RULES: dict[Any, Callable[[OpSchema], Layouts]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: functools.partial(_attention, 2, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: functools.partial(_attention, 3, 6),
    aten._assert_async.msg: lambda schema: _on_dims(0, 1, range(schema.args_strategy[0].ndim)),
    aten._assert_async.default: lambda schema: _on_dims(0, 1, range(schema.args_strategy[0].ndim)),
}
#: Operators that write a value into every element, wherever it is; a partial tensor would add it up.
RULES |= {
    overload: lambda schema: _on_dims(1, 1, range(schema.args_strategy[0].ndim))
    for overload in (aten.fill_.Scalar, aten.fill.Scalar)
}


class _Thread(threading.local):
    """Of this thread: who is told of an operator without a rule, and whether torch's cache may hold decisions by our
    rules, or some that are never found there again."""

    told: Callable[[str], None] | None = None
    decided: bool = False
    lost: bool = False


_thread = _Thread()


#: What torch calls between a look into its cache and the entry that it makes there, in C++, into the cache that it
#: looked into.
_BETWEEN_LOOK_AND_ENTRY = {
    method.__code__
    for method in (OpDispatcher.unwrap_to_op_info, OpDispatcher._propagate_op_sharding_dispatch_slow_path)
}


def _is_deciding() -> bool:
    """Whether this thread is in the middle of a decision: Dynamo traces frames that torch calls there."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in _BETWEEN_LOOK_AND_ENTRY:
        frame = frame.f_back
    return frame is not None


def forget_decisions() -> None:
    """Empties this thread's cache of decisions, but not in the middle of one."""
    if not _is_deciding():
        torch._C._clear_DTensor_sharding_propagator_cache()
        _thread.decided = _thread.lost = False


def _forget_our_decisions() -> None:
    """Forgets if a decision of ours may be in the cache; in the middle of a decision, the next call does."""
    if _thread.decided or _thread.lost:
        forget_decisions()


@contextlib.contextmanager
def fallback_reports(told: Callable[[str], None]) -> Iterator[None]:
    """Calls ``told(operator)`` whenever, meanwhile and on this thread, an operator runs on replicated tensors for lack
    of a rule.
    """
    _forget_our_decisions()  # what is found in the cache is decided without a word
    before, _thread.told = _thread.told, told
    try:
        yield
    finally:
        _thread.told = before


def can_replicate(op: torch._ops.OpOverload) -> bool:
    """Whether an operator gives the same result on every rank from replicated arguments, and writes to none of them."""
    schema = op._schema
    return (
        not schema.is_mutable
        and not any(value.alias_info for value in schema.returns)
        and all(str(value.type) == "Tensor" for value in schema.returns)
        and torch.Tag.nondeterministic_seeded not in op.tags
    )


def _strategy(layouts: Callable[[OpSchema], Layouts], schema: OpSchema) -> OpStrategy:
    """What torch asks of a rule: every combination of `layouts` over the mesh, with its cost."""
    mesh = schema.get_mesh_from_args()
    outputs = len(schema.op._schema.returns)
    inplace = schema.is_inplace_op()
    strategy = expand_to_full_mesh_op_strategy(mesh, schema, layouts(schema), input_index=outputs, inplace_op=inplace)
    keywords = [value.strategies[0].output_spec.placements for value in schema.kwargs_strategy]
    if keywords:  # torch redistributes positional arguments alone
        fits = [
            s for s in strategy.strategies if [spec.placements for spec in s.input_specs[-len(keywords) :]] == keywords
        ]
        if not fits:
            given = ", ".join(str(tuple(placements)) for placements in keywords)
            raise RuntimeError(
                f"{schema.op} cannot run with keyword tensors placed {given}: redistribute them to Replicate"
            )
        strategy = OpStrategy(fits)
    return strategy


def _replicated(schema: OpSchema) -> Layouts:
    return [[Replicate()] * (len(schema.op._schema.returns) + len(schema.args_strategy))]


#: Decisions by torch's rules that were made before, in this process: its own cache is emptied where a trace begins
#: (`compat.aot.dtensor_observer`). Known by the operator, its rules, its arguments, and the meshes that they are on.
_MOST_KNOWN = 1 << 14
_known: BoundedCache[Any, Any] = BoundedCache(_MOST_KNOWN)
#: Where those for symbolic sizes are kept: on what knows the symbols and their guards.
_KNOWN_OF_SYMBOLS = "_dtensor_compile_decisions"


def _propagate(replicate: Callable[[], bool], stock: Callable[..., Any], self: Any, op_schema: OpSchema) -> Any:
    """A decision by torch's rules and ours, over real meshes."""
    op = op_schema.op
    rules = self.op_strategy_funcs.get(op), self.op_single_dim_strategy_funcs.get(op)
    leaves = tree_leaves((op_schema.args_schema, op_schema.kwargs_schema))
    symbolic = [number for value in leaves for number in _symbols(value)]
    known = _decisions_for(symbolic)
    at = functools.partial(
        _at, symbolic=symbolic, sizes_are_arguments=any(isinstance(leaf, _SYMBOLIC) for leaf in leaves)
    )
    try:
        key = op, *map(id, rules), _key(op_schema.args_schema), _key(op_schema.kwargs_schema)
        decision = None if known is None else known.get(key, (None, None))[1]
        here = None if decision is None else at(decision)
    except TypeError:  # an argument that has no hash
        known = here = None
    if known is None:
        return _propagated(replicate, stock, self, op_schema)
    if here is None:
        before, _thread.decided = _thread.decided, False
        try:
            decision = _propagated(replicate, stock, self, op_schema)
            if not _thread.decided and at(decision) is not None:
                meshes = [real_mesh(leaf.mesh) for leaf in leaves if isinstance(leaf, DTensorSpec)]
                known[key] = (rules, meshes), decision  # what lives on keeps its id
        finally:
            _thread.decided = _thread.decided or before
        return copy.copy(decision)
    return here


def _at(decision: Any, symbolic: Sequence[Any], sizes_are_arguments: bool) -> Any:
    """A copy of a decision with the symbolic numbers of the arguments at hand for equal ones of its own, which are
    nodes of another place in the graph, or of another graph, and new nodes for sizes of the result; None where it has
    another number of its own.

    Where arguments are sizes, those of the result are theirs, and no new ones.
    """
    found, given = copy.copy(decision), {_expression(number): number for number in symbolic}
    if not given:
        return found

    def here(value: Any) -> Any:
        if isinstance(value, DTensorSpec) and _symbols(value):
            meta, value = value.tensor_meta, copy.copy(value)
            sizes = (torch.Size(map(number_here, meta.shape)), tuple(map(number_here, meta.stride)))
            value.tensor_meta = TensorMeta(*sizes, meta.dtype)
            return value
        return number_here(value)

    def number_here(number: Any) -> Any:
        if not isinstance(number, _SYMBOLIC):
            return number
        expression = _expression(number)
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


def _decisions_for(symbolic: Sequence[Any]) -> dict[Any, Any] | None:
    """Where the decision for arguments with these symbolic numbers is looked up and kept; None where it is made each
    time.

    One with symbols adds guards to what knows the symbols, which holds for the next decision like it as long as that
    does. So it is made again where guards are not kept, and for numbers that only the data decides, which have checks
    in the graph instead."""
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
    return [number for number in numbers if isinstance(number, _SYMBOLIC)]


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _key(value: Any) -> Any:
    """An argument of an operator as what it is known by: a number with its type, which may decide the dtype of the
    result, a symbolic one by its expression; a spec with the mesh that stands behind it and no equal one, which may
    have lost its groups."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(value[name])) for name in sorted(value))
    if isinstance(value, DTensorSpec):
        meta = value.tensor_meta
        sizes = meta and (*map(_expression, meta.shape), *map(_expression, meta.stride), meta.dtype)
        return id(real_mesh(value.mesh)), value.placements, value.shard_order, sizes
    return type(value), _expression(value)


def _propagated(replicate: Callable[[], bool], stock: Callable[..., Any], self: Any, op_schema: OpSchema) -> Any:
    decision = _decide(replicate, stock, self, op_schema)
    decision.output_spec = tree_map(_over_real_mesh, decision.output_spec)
    schema = decision.redistribute_schema
    if schema is not None:
        values = tree_map(_over_real_mesh, schema.args_schema)
        decision.redistribute_schema = OpSchema(schema.op, values, schema.kwargs_schema, schema.schema_info)
    return decision


def _over_real_mesh(value: Any) -> Any:
    """A spec over the mesh that stands behind what a tracer put in its place; other values as they are."""
    if not isinstance(value, DTensorSpec) or type(value.mesh) is DeviceMesh:
        return value
    real = copy.copy(value)
    real.mesh = real_mesh(value.mesh)
    return real


def _decide(replicate: Callable[[], bool], stock: Callable[..., Any], self: Any, op_schema: OpSchema) -> Any:
    op_schema = _with_whole_slice(op_schema)
    op, layouts = op_schema.op, RULES.get(op_schema.op)
    if _is_whole_slice_backward(op_schema):
        layouts = _anywhere
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
        layouts = _replicated
        if _thread.told is not None:
            _thread.told(str(op))
    _thread.decided = True
    single = self.op_single_dim_strategy_funcs
    with mock.patch.dict(self.op_strategy_funcs, {op: functools.partial(_strategy, layouts)}), mock.patch.dict(single):
        single.pop(op, None)  # 2.14 has one for `slice_backward`, and asks it first
        return stock(self, op_schema)


def _with_whole_slice(schema: OpSchema) -> OpSchema:
    """``slice(x, d, 0, sys.maxsize)`` as ``slice(x, d, 0, x.shape[d])``: the same, and torch sees that it takes all."""
    if schema.op is not aten.slice.Tensor or len(schema.args_schema) < 4:
        return schema
    spec, dim, start, end, *rest = schema.args_schema
    if start not in (None, 0) or not isinstance(end, int) or end < sys.maxsize:
        return schema
    return OpSchema(schema.op, (spec, dim, 0, spec.shape[dim], *rest), schema.kwargs_schema, schema.schema_info)


def _is_whole_slice_backward(schema: OpSchema) -> bool:
    """Whether the gradient of a slice is the gradient of all that was sliced."""
    if schema.op is not aten.slice_backward.default:
        return False
    start, end, step = schema.args_schema[3:6]
    return start == 0 and step == 1 and isinstance(end, int) and end >= sys.maxsize


def _gradient_of_convolution(stock: Callable[..., Any], self: Any, schema: OpSchema) -> Any:
    """The decision with 2.14's rule, which places gradients that nobody asked for, where its layout of whole tensors
    places none.

    Of a mesh of more than one dim, where one dim takes the batch and another nothing, such a gradient would have half a
    placement."""
    rule, asked = self.op_single_dim_strategy_funcs[schema.op], schema.args_schema[10]

    def layouts(*args: Any) -> list[list[Any]]:
        return [
            [None if i < len(asked) and not asked[i] else p for i, p in enumerate(layout)]
            for layout in rule.func(*args)
        ]

    with mock.patch.dict(self.op_single_dim_strategy_funcs, {schema.op: dataclasses.replace(rule, func=layouts)}):
        return stock(self, schema)


def _anywhere(schema: OpSchema) -> Layouts:
    """One tensor in, one out, in the same placement whatever it is."""
    (value,) = schema.args_strategy
    return [[p, p] for p in {p: None for s in value.strategies for p in s.output_spec.placements}]


def _hash(stock: Callable[..., int], self: OpSchema) -> int:
    """A number that is not known while tracing cannot be looked up; torch computes without its cache then.

    Asked for its hash, a symbolic float would be fixed to its value, or raise where it has none.
    """
    if any(
        isinstance(arg, (torch.SymFloat, torch.SymBool)) for arg in tree_leaves((self.args_schema, self.kwargs_schema))
    ):
        raise TypeError("a symbolic number has no hash")
    return stock(self)


def _spec_hash(stock: Callable[..., int], self: DTensorSpec) -> int:
    """The hash of a spec, of one with a symbolic stride by its identity.

    Where a size is symbolic torch does not look into its cache; of strides it does not ask, and a symbolic number has
    no hash. What is decided for such a spec is then in the cache and never found again, until the scope ends.
    """
    try:
        return stock(self)
    except TypeError:
        _thread.lost = True
        return object.__hash__(self)


def _own_mask(stock: Callable[..., Any], info: OpInfo, schema: OpSchema, use_values: bool) -> Any:
    """The arguments of a row-wise lookup are cut with a mask of its own.

    torch keeps the mask in the placement of its decision, which all lookups like it share: it compares masks then,
    which cannot be traced. Here the decision gets a new mask before the lookup runs; results of earlier lookups keep
    theirs."""
    have = {p for spec in info.flat_args_schema if isinstance(spec, DTensorSpec) for p in spec.placements}
    want = {p for spec in schema.args_spec for p in spec.placements if isinstance(p, _MaskPartial)}
    if want and not want & have:
        fresh = {p: dataclasses.replace(p, mask_buffer=MaskBuffer()) for p in want}
        _thread.decided = True  # no eager lookup may meet the mask of a traced one
        decision = info.output_sharding
        decision.output_spec = tree_map(functools.partial(_with_placements, fresh), decision.output_spec)
        values = tree_map(functools.partial(_with_placements, fresh), schema.args_schema)
        schema = decision.redistribute_schema = OpSchema(schema.op, values, schema.kwargs_schema, schema.schema_info)
    return stock(info, schema, use_values)


def _with_placements(new: Mapping[Placement, Placement], value: Any) -> Any:
    """A spec with placements exchanged; other values as they are."""
    if not isinstance(value, DTensorSpec) or not new.keys() & set(value.placements):
        return value
    changed = copy.copy(value)
    changed.placements = tuple(new.get(p, p) for p in value.placements)
    return changed


#: What counts the cost of a redistribution.
_COSTS = {redistribute_cost.__code__, DTensorRedistributePlanner.__init__.__code__}


def _is_part_of_mesh(stock: Callable[[DeviceMesh], bool], self: DeviceMesh) -> bool:
    """Whether this rank is part of the mesh; where costs are counted each is, so that all find the same."""
    is_part = stock(self)
    if is_part or sys._getframe(2).f_code not in _COSTS:
        return is_part
    _thread.decided = True  # eager decides otherwise
    return True


#: What redistributions cost torch, by meshes and specs: a search for the cheapest path, which torch repeats for each
#: pair of placements that an operator could have, and remembers in eager alone.
_MOST_COSTS = 1 << 16
_costs: BoundedCache[Any, float] = BoundedCache(_MOST_COSTS)
#: Where they are kept on what traces.
_COSTS_OF_TRACE = "_dtensor_compile_costs"


def _known_cost(stock: Callable[..., float], current: DTensorSpec, target: DTensorSpec) -> float:
    """Cost of a redistribution in torch's estimate; it depends on layouts and sizes alone, not on the rank.

    One of symbolic sizes is an expression, which belongs to one trace.
    """
    metas, mesh = (current.tensor_meta, target.tensor_meta), real_mesh(current.mesh)
    if None in metas or current.mesh != target.mesh or mesh.get_coordinate() is None:
        return stock(current, target)
    symbolic = next(
        (size for meta in metas for size in (*meta.shape, *meta.stride) if isinstance(size, torch.SymInt)), None
    )
    known = (
        _costs
        if symbolic is None
        else vars(get_proxy_mode() or symbolic.node.shape_env).setdefault(_COSTS_OF_TRACE, BoundedCache(_MOST_COSTS))
    )
    sizes = [(*map(_expression, meta.shape), *map(_expression, meta.stride), meta.dtype) for meta in metas]
    layout = mesh.device_type, rank_map(mesh), *mesh_dims(mesh)
    key = str(layout), *sizes, *((s.placements, s.shard_order) for s in (current, target))
    try:
        found = known.get(key)
    except TypeError:  # a mask that has no hash
        return stock(current, target)
    if found is None:
        found = stock(current, target)
        known[key] = found
    return found


def _expression(number: Any) -> Any:
    return number.node.expr if isinstance(number, _SYMBOLIC) else number


def _one_hot(stock: Callable[..., Any], value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """torch compares the classes with a plain ``arange``, the same on every rank."""
    with implicit_replication() if isinstance(value, DTensor) else contextlib.nullcontext():
        return stock(value, *args, **kwargs)


@contextlib.contextmanager
def _kernel_replaced(
    op: torch._ops.OpOverload, replacement: Callable[..., Any], ours: Callable[[], bool]
) -> Iterator[None]:
    """While it is entered, the Python kernel of a composite operator is ``replacement(stock, ...)`` for frames of ours.

    Before 2.13 there may be none.
    """
    stock = op.py_kernels.get(torch._C.DispatchKey.CompositeImplicitAutograd)
    if stock is None:
        yield
        return

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return replacement(stock, *args, **kwargs) if ours() else stock(*args, **kwargs)

    with mock.patch.dict(op.py_kernels, {torch._C.DispatchKey.CompositeImplicitAutograd: kernel}):
        op._dispatch_cache.clear()
        try:
            yield
        finally:
            op._dispatch_cache.clear()


def _local_shape_and_offset(
    stock: Callable[..., Any],
    global_shape: Sequence[Any],
    mesh_shape: Sequence[int],
    my_coordinate: Any,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Where the local shard begins, in integers: shards of one dim nest left to right, so that their offsets add up.

    An empty shard begins where the tensor ends. Strided shards stay with torch.
    """
    if skip_offset or my_coordinate is None or any(isinstance(p, _StridedShard) for p in placements):
        return stock(global_shape, mesh_shape, my_coordinate, placements, skip_offset)
    sizes, offsets = list(global_shape), [0] * len(global_shape)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            rank = my_coordinate(mesh_dim) if callable(my_coordinate) else my_coordinate[mesh_dim]
            size, offset = Shard.local_shard_size_and_offset(sizes[placement.dim], mesh_shape[mesh_dim], rank)
            sizes[placement.dim] = size
            empty = isinstance(size, int) and size == 0
            offsets[placement.dim] = global_shape[placement.dim] if empty else offsets[placement.dim] + offset
    return tuple(sizes), tuple(offsets)


#: Which offsets of a strided shard are wanted; before 2.13 all of them or the first.
_OFFSETS: Any = if_there("torch.distributed.tensor.placement_types:_StridedShardOffsetMode")


def _strided_shard_size(stock: Callable[..., Any], self: _StridedShard, size: Any, *args: Any, **kwargs: Any) -> Any:
    """Size and offsets of a strided shard, which torch reads out of a tensor: one with values, where the dim has a
    size.

    Where it has none a shard's first offset, which is asked for by default and mostly thrown away, would have to be
    read out of a tensor without values. It is known where shards are even; else it is None.
    """
    if isinstance(size, int):
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            return stock(self, size, *args, **kwargs)
    if len(args) != 2 or kwargs or _OFFSETS is None:
        return stock(self, size, *args, **kwargs)
    chunks, rank = args
    pieces = self.split_factor * chunks
    if guard_or_false(size % pieces == 0):
        return size // chunks, rank * (size // pieces)
    return stock(self, size, chunks, rank, _OFFSETS.NONE)


def _fix_flattened_sizes(
    stock: Callable[..., Any],
    self: Any,
    p: Shard,
    mesh_dim: int,
    placements: Any,
    claimed: Any,
    local_shapes: list[Any],
    *rest: Any,
) -> Any:
    """Sizes before a sharded dim that is flattened with them become numbers, under a guard: they are its split
    factor.
    """
    for dim in self.rule:
        flat = (
            [d.input_dim for d in dim.input_dims if isinstance(d, _view_ops.InputDim)]
            if isinstance(dim, _view_ops.Flatten)
            else []
        )
        if p.dim in flat[1:]:
            for before in range(flat[0], p.dim):
                local_shapes[before] = int(local_shapes[before])
    return stock(self, p, mesh_dim, placements, claimed, local_shapes, *rest)


def unflatten(
    stock: Callable[..., DTensor], inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
) -> DTensor:
    """A DTensor with strided shards from its parts. Views make specs of them that name a shard order too, which torch
    refuses here.
    """
    placements, meta, order, requires_grad = flatten_spec
    if order is None or not any(isinstance(p, _StridedShard) for p in placements):
        return stock(inner_tensors, flatten_spec, outer_size, outer_stride)
    spec = spec_of_parts(placements, meta.dtype, order, inner_tensors["device_mesh"], outer_size, outer_stride)
    return DTensor(inner_tensors["_local_tensor"], spec, requires_grad=requires_grad)


#: As of 2.13 a view that flattens a sharded dim makes a strided shard of it; before, it redistributes.
_VIEWS: Any = if_there("torch.distributed.tensor._ops._view_ops:_ViewShardingPropagator")
_STRIDED_VIEWS = () if _VIEWS is None else (
    hook("torch.distributed.tensor:DTensor.__tensor_unflatten__", "inner_tensors flatten_spec outer_size outer_stride"),
    hook(
        "torch.distributed.tensor._ops._view_ops:_ViewShardingPropagator._rewrite_plain_shard",
        "self p mesh_dim placements strided_shard_claimed_dims local_tensor_shapes ...",
    ),
)  # fmt: skip


def _meta_untraced(stock: Callable[..., Any], self: Any, op_schema: OpSchema) -> Any:
    """Sizes of a result are found by running the operator on tensors without values; before 2.13 that is traced, and
    draws once more.
    """
    with disable_proxy_modes_tracing():
        return stock(self, op_schema)


def _replaced(owner: Any, name: str, replacement: Callable[..., Any], ours: Callable[[], bool]) -> Any:
    """A context manager: ``owner.name`` is ``replacement(stock, ...)`` for frames of ours, and torch's own for all
    others.
    """
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(stock, *args, **kwargs) if ours() else stock(*args, **kwargs)

    setattr(replaced, STANDS_FOR, stock)
    return mock.patch.object(
        owner, name, staticmethod(replaced) if isinstance(vars(owner)[name], staticmethod) else replaced
    )


@needs(
    "sharding rules that are the same on all ranks",
    hook(
        "torch.distributed.tensor._dispatch:OpDispatcher.redistribute_local_args",
        "op_info suggested_input_schema use_val_from_redistribute_schema",
    ),
    hook("torch.distributed.tensor._op_schema:OpSchema.__hash__", "self"),
    hook("torch.distributed.tensor._dtensor_spec:DTensorSpec._hash_impl", "self"),
    hook("torch.distributed.device_mesh:DeviceMesh._is_current_rank_part_of_mesh", "self"),
    hook(
        "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset",
        "global_shape mesh_shape my_coordinate placements ...",
    ),
    hook("torch.distributed.tensor._ops.utils:redistribute_cost", "current_spec target_spec"),
    hook(
        "torch.distributed.tensor.placement_types:_StridedShard.local_shard_size_and_offset",
        "self curr_local_size num_chunks rank ...",
    ),
    *_STRIDED_VIEWS,
    hook("torch.fx.experimental.symbolic_shapes:ShapeEnv._suppress_guards_tls"),
    hook(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator.propagate_op_sharding_non_cached", "self op_schema"
    ),
    without="ranks could decide differently",
    essential=True,
)
@contextlib.contextmanager
def sharding_rules(serves: Callable[[], bool], replicate: Callable[[], bool]) -> Iterator[None]:
    """While it is entered, DTensor's rules are those of this module for frames of ours; see the module's docstring.

    Args:
        serves: whether what this thread traces now is for our backend.
        replicate: whether an operator without a rule may run on replicated tensors.
    """
    owner = threading.get_ident()

    def ours() -> bool:
        return threading.get_ident() == owner and serves()

    changes = (
        (OpDispatcher, "redistribute_local_args", _own_mask),
        (OpSchema, "__hash__", _hash),
        (DTensorSpec, "_hash_impl", _spec_hash),
        (DeviceMesh, "_is_current_rank_part_of_mesh", _is_part_of_mesh),
        (shard_utils, "_compute_local_shape_and_global_offset", _local_shape_and_offset),
        (op_utils, "redistribute_cost", _known_cost),
        (_StridedShard, "local_shard_size_and_offset", _strided_shard_size),
        (ShardingPropagator, "propagate_op_sharding_non_cached", functools.partial(_propagate, replicate)),
    )
    if not OPAQUE:
        changes += ((ShardingPropagator, "_propagate_tensor_meta_non_cached", _meta_untraced),)
    if _VIEWS is not None:
        changes += (
            (DTensor, "__tensor_unflatten__", unflatten),
            (_VIEWS, "_rewrite_plain_shard", _fix_flattened_sizes),
        )
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_our_decisions)
        for place, name, replacement in changes:
            stack.enter_context(_replaced(place, name, replacement, ours))
        stack.enter_context(_kernel_replaced(aten.one_hot.default, _one_hot, ours))
        yield
