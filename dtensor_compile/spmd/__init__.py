"""Partition-spec annotations on plain torch: what torch_xla's SPMD users write, compiled to DTensor placements.

- ``mesh``: a grid of devices with named axes; ``partition_spec``: which axes cut which dim; ``op_sharding``: what that means, device
  by device.
- ``annotate``: `mark_sharding` and its family; ``shard_module``: storage as marked; ``propagate``: what follows for other tensors.
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
from dtensor_compile.spmd.mesh import Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from dtensor_compile.spmd.op_sharding import OpSharding, ShardingType
from dtensor_compile.spmd.shard_module import shard_module

__all__ = [
    "Mesh", "OpSharding", "ShardingType", "clear_sharding", "get_1d_mesh", "get_global_mesh", "mark_sharding",
    "mark_sharding_with_gradients", "set_global_mesh", "shard_as", "shard_module", "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor", "wrap_if_sharded",
]  # fmt: skip
