"""Partition-spec annotations on plain torch: what torch_xla's SPMD users write, compiled to DTensor placements.

- ``mesh``: a grid of devices with named axes; ``partition_spec``: which axes cut which dim; ``op_sharding``: what that means, device
  by device.
"""

from dtensor_compile.spmd.mesh import Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from dtensor_compile.spmd.op_sharding import OpSharding, ShardingType

__all__ = ["Mesh", "OpSharding", "ShardingType", "get_1d_mesh", "get_global_mesh", "set_global_mesh"]
