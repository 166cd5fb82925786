"""Partition-spec annotations on plain torch: what torch_xla's SPMD users write, compiled to DTensor placements.

- ``mesh``: a grid of devices with named axes; ``partition_spec``: which axes cut which dim; ``op_sharding``: what that
  means, device by device.
- ``loader``: specs for many tensors, and data loaders; ``nd_linear``: linear layers that keep the dims of their input.
- ``manual``: regions that work on what each device has; ``barrier``: a module's backward stays apart.
- ``annotate``: `mark_sharding` and its family; ``shard_module``: storage as marked; ``propagate``: what follows for
  other tensors.
- ``spread`` and ``rewrite``: annotations in a graph (``dtensor_graph``: how they change it; ``function_rules``: calls
  that are changed first); ``other_ranks``: what holds on all ranks; ``recurrent``: layers of many steps.
"""

from dtensor_compile.spmd.annotate import (
    clear_sharding,
    mark_sharding,
    mark_sharding_with_gradients,
    shard_as,
    unwrap_sharded_tensor,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
)
from dtensor_compile.spmd.barrier import apply_backward_optimization_barrier
from dtensor_compile.spmd.logical_mesh import Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from dtensor_compile.spmd.manual import disable_manual_sharding, enable_manual_sharding, manual_region
from dtensor_compile.spmd.nd_linear import NDLinear, with_nd_linear
from dtensor_compile.spmd.op_sharding import OpSharding, ShardingType
from dtensor_compile.spmd.shard_module import shard_module
from dtensor_compile.spmd.sharding_spec import ShardedLoader, ShardingSpec

__all__ = [
    "Mesh", "NDLinear", "OpSharding", "ShardedLoader", "ShardingSpec", "ShardingType",
    "apply_backward_optimization_barrier",
    "clear_sharding", "disable_manual_sharding", "enable_manual_sharding", "get_1d_mesh", "get_global_mesh",
    "manual_region",
    "mark_sharding", "mark_sharding_with_gradients", "set_global_mesh", "shard_as", "shard_module",
    "unwrap_sharded_tensor",
    "with_nd_linear", "wrap_as_sharded_tensor", "wrap_if_sharded",
]  # fmt: skip
