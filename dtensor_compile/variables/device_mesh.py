"""``DeviceMesh``.

torch guards a mesh by its ranks, layout, device type, dim names and thread. Shape, coordinates and slices follow from those, for
the process that compiles. Slices and flattened meshes are made while tracing, once, and are constants of the compiled code: each
would be a new object on each call of the eager program, equal to the others. Members that make other process groups
(``_unflatten``) are left to Python: tracing may start over, and ranks would then disagree on how many groups there are.
"""

from __future__ import annotations

from typing import NoReturn

from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.compat.dynamo import never_trace
from dtensor_compile.variables.members import SourcedVariable, table


class DeviceMeshVariable(SourcedVariable):
    kind = "mesh"
    members = table(
        bake="""
            ndim shape device_type mesh_dim_names size get_coordinate get_rank get_local_rank
            __getitem__ _flatten _is_current_rank_part_of_mesh _sym_get_coordinate _get_mesh_dim_by_name _get_root_mesh_dim
            _device_type _mesh_dim_names _thread_id _coordinate_on_dim _stable_hash
            __repr__ __str__ __hash__ __eq__ __ne__ __format__
        """,
        read="mesh _layout _rank_map _flatten_rank_map _root_mesh _pg_registry _flatten_mapping _dim_group_names",
        inline="get_group get_all_groups _get_or_create_default_group _get_root_mesh _hash_key",
    )

    def refuse(self, name: str) -> NoReturn:
        never_trace(DeviceMesh.__init__)  # the member runs in Python, and torch cannot trace a mesh that is half made
        super().refuse(name)
