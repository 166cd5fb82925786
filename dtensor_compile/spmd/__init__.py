"""Partition-spec annotations on plain torch programs, with torch_xla's SPMD interface, compiled to DTensor placements.

- ``logical_mesh``: a grid of devices with named axes; ``partition_spec``: which axes shard which dim; ``op_sharding``:
  the shard of each device.
- ``sharding_spec``: specs for many tensors, and data loaders; ``nd_linear``: linear layers that keep the dims of their
  input.
- ``manual``: regions over local tensors; ``barrier``: separates the backward of a module from its neighbours'.
- ``annotate``: `mark_sharding` and its family; ``shard_module``: storage as marked; ``propagate``: shardings of other
  tensors.
- ``spread`` and ``rewrite``: annotations in a graph (``dtensor_graph``: edits of the graph; ``function_rules``: calls
  that are changed first); ``other_ranks``: errors on any rank; ``recurrent``: recurrent layers.
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
