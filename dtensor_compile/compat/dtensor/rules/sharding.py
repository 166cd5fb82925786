"""DTensor's sharding rules while our backend traces: adds missing ones, and makes others traceable.

`sharding_rules` is entered and left with the scope in which Dynamo traces for our backend (`compat.dynamo.tracing`).
Inside:

- The offset of a shard is computed from integers. torch reads it out of a tensor, which has no values while tracing;
  for a strided shard, the tensor gets values.
- A slice of all of a dim is recognized even if the size is symbolic (`x[:, 1:3]` slices dim 0 up to ``sys.maxsize``).
- Flattening a sharded dim specializes the sizes before it, as the strided shard needs an integer.
- A symbolic number stays symbolic while an operator looks for its rule.
- A spec with a symbolic stride but no symbolic size (some columns of a matrix whose number is dynamic) is hashed by
  identity.
- ``one_hot`` compares with numbers that are the same on every rank.
- An operator in `RULES` follows the rule there; an operator without a rule runs on replicated tensors (`fallback`).
- Each row-wise lookup has its own mask.
- A keyword tensor (a mask of attention) is cut as the rule of its operator wants it.
- A DTensor with strided shards can be flattened and unflattened.
- A rank outside of a mesh decides as the ranks inside do. torch counts every redistribution as free there, which would
  select the first strategy of an operator.

torch caches decisions, and traced and eager calls share the cache. A decision by a rule of ours must not reach an eager
call, so the cache is cleared at the end of the scope after such a decision. The same holds for the objects that stand
for meshes while AOTAutograd traces: decisions refer to the meshes themselves.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.utils._pytree import tree_leaves, tree_map

from dtensor_compile.bounded_cache import BoundedCache
from dtensor_compile.compat.apply_patches import on_this_thread, patched, patched_entries
from dtensor_compile.compat.distributed.device_meshes import mesh_dims, rank_map, real_mesh
from dtensor_compile.compat.dtensor.rules.operator_rules import Cut, aten
from dtensor_compile.compat.dtensor.rules.sharding_decisions import (
    SINGLE_DIM_STRATEGIES,
    STRATEGIES,
    expression_of,
    forget_our_decisions,
    propagate,
    this_thread,
)
from dtensor_compile.compat.dtensor.shard_sizes import (
    fix_flattened_sizes,
    local_shape_and_offset,
    strided_shard_size,
    unflatten,
)
from dtensor_compile.compat.dtensor.specs import redistribute_local
from dtensor_compile.compat.dynamo.settings import implicit_replication
from dtensor_compile.compat.dynamo.trackers.constant_objects import OPAQUE
from dtensor_compile.compat.patches import Patch, hook, if_there, needs, patch


def _hash(stock: Callable[..., int], self: OpSchema) -> int:
    """Refuses to hash a schema with a symbolic float or bool, so torch computes without its cache.

    Hashing a symbolic float would specialize it, or raise if it is unbacked.
    """
    if any(
        isinstance(arg, (torch.SymFloat, torch.SymBool)) for arg in tree_leaves((self.args_schema, self.kwargs_schema))
    ):
        raise TypeError("a symbolic number has no hash")
    return stock(self)


def _spec_hash(stock: Callable[..., int], self: DTensorSpec) -> int:
    """The hash of a spec; its identity if a stride is symbolic.

    torch skips its cache for symbolic sizes, but does not check strides, and symbolic numbers have no hash. The
    decision for such a spec stays in the cache, never to be found, until the scope ends.
    """
    try:
        return stock(self)
    except TypeError:
        this_thread.lost = True
        return object.__hash__(self)


def _local_arguments(stock: Callable[..., Any], info: OpInfo, schema: OpSchema, use_values: bool) -> Any:
    """Redistributes keyword tensors too, which torch leaves as they are."""
    done = stock(info, _with_own_mask(info, schema), use_values)
    for name, cut in schema.kwargs_schema.items():
        if isinstance(cut, Cut):
            local = info.local_kwargs[name]
            assert isinstance(local, torch.Tensor)  # it has a spec
            info.local_kwargs[name] = redistribute_local(local, cut.before, cut.after)
    return done


def _with_own_mask(info: OpInfo, schema: OpSchema) -> OpSchema:
    """Gives the decision for a row-wise lookup a new mask before the lookup runs; earlier results keep theirs.

    torch keeps the mask in the placement of the cached decision, which equal lookups share, and compares masks, which
    cannot be traced.
    """
    have = {p for spec in info.flat_args_schema if isinstance(spec, DTensorSpec) for p in spec.placements}
    want = {p for spec in schema.args_spec for p in spec.placements if isinstance(p, _MaskPartial)}
    if want and not want & have:
        fresh: dict[Placement, Placement] = {p: dataclasses.replace(p, mask_buffer=MaskBuffer()) for p in want}
        this_thread.decided = True  # no eager lookup may use the mask of a traced one
        decision = info.output_sharding
        assert decision is not None  # `schema` is part of it
        decision.output_spec = tree_map(functools.partial(_with_placements, fresh), decision.output_spec)
        values = tree_map(functools.partial(_with_placements, fresh), schema.args_schema)
        schema = decision.redistribute_schema = OpSchema(schema.op, values, schema.kwargs_schema, schema.schema_info)
    return schema


def _with_placements(new: Mapping[Placement, Placement], value: Any) -> Any:
    """The spec with placements replaced; other values as they are."""
    if not isinstance(value, DTensorSpec) or not new.keys() & set(value.placements):
        return value
    changed = copy.copy(value)
    changed.placements = tuple(new.get(p, p) for p in value.placements)
    return changed


#: Code of the functions that estimate the cost of a redistribution.
_COSTS = {redistribute_cost.__code__, DTensorRedistributePlanner.__init__.__code__}


def _is_part_of_mesh(stock: Callable[[DeviceMesh], bool], self: DeviceMesh) -> bool:
    """Whether this rank is part of the mesh; always true during cost estimates, so that all ranks agree."""
    is_part = stock(self)
    if is_part or sys._getframe(2).f_code not in _COSTS:
        return is_part
    this_thread.decided = True  # an eager call decides differently
    return True


#: torch's cost estimates of redistributions by mesh and specs. Each is a search for the cheapest path, which torch
#: repeats for each pair of placements that an operator could have, and caches in eager mode only.
_MOST_COSTS = 1 << 16
_costs: BoundedCache[Any, float] = BoundedCache(_MOST_COSTS)
#: Attribute of a proxy mode or shape env that holds its costs.
_COSTS_OF_TRACE = "_dtensor_compile_costs"


def _known_cost(stock: Callable[..., float], current: DTensorSpec, target: DTensorSpec) -> float:
    """torch's cost estimate of a redistribution, cached; it depends on layouts and sizes, not on the rank.

    With symbolic sizes it is an expression that belongs to one trace, and is cached there.
    """
    before, after, mesh = current.tensor_meta, target.tensor_meta, real_mesh(current.mesh)
    if before is None or after is None or current.mesh != target.mesh or mesh.get_coordinate() is None:
        return stock(current, target)
    metas = (before, after)
    symbolic = next(
        (size for meta in metas for size in (*meta.shape, *meta.stride) if isinstance(size, torch.SymInt)), None
    )
    known = (
        _costs
        if symbolic is None
        else vars(get_proxy_mode() or symbolic.node.shape_env).setdefault(_COSTS_OF_TRACE, BoundedCache(_MOST_COSTS))
    )
    sizes = [(*map(expression_of, meta.shape), *map(expression_of, meta.stride), meta.dtype) for meta in metas]
    layout = mesh.device_type, rank_map(mesh), *mesh_dims(mesh)
    key = str(layout), *sizes, *((s.placements, s.shard_order) for s in (current, target))
    try:
        found = known.get(key)
    except TypeError:  # a mask without a hash
        return stock(current, target)
    if found is None:
        found = stock(current, target)
        known[key] = found
    return found


def _one_hot(stock: Callable[..., Any], value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Lets torch compare the classes with a plain ``arange``, which is the same on every rank."""
    with implicit_replication() if isinstance(value, DTensor) else contextlib.nullcontext():
        return stock(value, *args, **kwargs)


@contextlib.contextmanager
def _kernel_replaced(op: torch._ops.OpOverload, replacement: Callable[..., Any]) -> Iterator[None]:
    """While active, the Python kernel of a composite operator is ``replacement(stock, ...)`` on this thread.

    Before 2.13 there may be no such kernel.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    stock = op.py_kernels.get(key)
    if stock is None:
        yield
        return
    with patched_entries(_KERNELS, {key: on_this_thread(stock, replacement)}, op.py_kernels):
        op._dispatch_cache.clear()
        try:
            yield
        finally:
            op._dispatch_cache.clear()


#: Since 2.13 a view that flattens a sharded dim makes a strided shard; before, it redistributes.
_VIEWS: Any = if_there("torch.distributed.tensor._ops._view_ops:_ViewShardingPropagator")


def _meta_untraced(stock: Callable[..., Any], self: Any, op_schema: OpSchema) -> Any:
    """Computes the metadata of a result untraced; before 2.13 torch traces it, and draws random numbers twice."""
    with disable_proxy_modes_tracing():
        return stock(self, op_schema)


#: Patches of torch's functions that decide on placements, with their replacements ``replacement(stock, ...)``.
_CHANGES: dict[Patch, Callable[..., Any]] = {
    patch(
        "torch.distributed.tensor._dispatch:OpDispatcher.redistribute_local_args",
        "op_info suggested_input_schema use_val_from_redistribute_schema",
    ): _local_arguments,
    patch("torch.distributed.tensor._op_schema:OpSchema.__hash__", "self"): _hash,
    patch("torch.distributed.tensor._dtensor_spec:DTensorSpec._hash_impl", "self"): _spec_hash,
    patch("torch.distributed.device_mesh:DeviceMesh._is_current_rank_part_of_mesh", "self"): _is_part_of_mesh,
    patch(
        "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset",
        "global_shape mesh_shape my_coordinate placements ...",
    ): local_shape_and_offset,
    patch("torch.distributed.tensor._ops.utils:redistribute_cost", "current_spec target_spec"): _known_cost,
    patch(
        "torch.distributed.tensor.placement_types:_StridedShard.local_shard_size_and_offset",
        "self curr_local_size num_chunks rank ...",
    ): strided_shard_size,
}
if not OPAQUE:
    _CHANGES[
        patch(
            "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
            "self op_schema",
        )
    ] = _meta_untraced
if _VIEWS is not None:
    _CHANGES[
        patch(
            "torch.distributed.tensor:DTensor.__tensor_unflatten__",
            "inner_tensors flatten_spec outer_size outer_stride",
        )
    ] = unflatten
    _CHANGES[
        patch(
            "torch.distributed.tensor._ops._view_ops:_ViewShardingPropagator._rewrite_plain_shard",
            "self p mesh_dim placements strided_shard_claimed_dims local_tensor_shapes ...",
        )
    ] = fix_flattened_sizes
_PROPAGATE = patch(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator.propagate_op_sharding_non_cached", "self op_schema"
)
_KERNELS = patch("torch._ops:OpOverload.py_kernels", optional=True)


@needs(
    "sharding rules that are the same on all ranks",
    *_CHANGES,
    _PROPAGATE,
    _KERNELS,
    STRATEGIES,
    SINGLE_DIM_STRATEGIES,
    hook("torch.fx.experimental.symbolic_shapes:ShapeEnv._suppress_guards_tls"),
    without="ranks could decide differently",
    essential=True,
    upstream="#160697, #185356, #127797, #152963, #184945, #166483, #158476, #162307, #187373",
    remove_when="decisions do not depend on whether a rank is in the mesh, specs hash symbolic numbers, and DTensor "
    "has a public fallback to replicated tensors",
)
@contextlib.contextmanager
def sharding_rules(replicate: Callable[[], bool]) -> Iterator[None]:
    """While active, DTensor's rules on this thread are those of this module; see the module's docstring.

    Args:
        replicate: returns whether an operator without a rule may run on replicated tensors.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(forget_our_decisions)
        changes: dict[Patch, Callable[..., Any]] = {**_CHANGES, _PROPAGATE: functools.partial(propagate, replicate)}
        for row, replacement in changes.items():
            stack.enter_context(patched(row, replacement))
        stack.enter_context(_kernel_replaced(aten.one_hot.default, _one_hot))
        yield
