"""``DeviceMesh``.

torch guards a mesh by its ranks, layout, device type, dim names and thread. Shape, coordinates and slices follow from
those, for the process that compiles. Slices and flattened meshes are created once, while tracing, and are constants of
the compiled code; each call of the eager program would create a new, equal object. Members that create process groups
are called once per place of the program (``mesh_constructors.py``). ``mesh.mesh`` is a tensor of constants. ``with
mesh:`` makes it the current mesh of the code traced inside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.compat.dynamo.left_to_python import leave_to_python
from dtensor_compile.compat.dynamo.trackers.calls import ContextVariable, emit_call
from dtensor_compile.compat.dynamo.trackers.constant_tensors import constant_tensor
from dtensor_compile.compat.dynamo.trackers.mesh_guards import guard_mesh_by_value
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Source, Translator, VariableTracker
from dtensor_compile.variables.member_rules import SourcedVariable, table
from dtensor_compile.variables.mesh_constructors import enter_mesh, make_once, real_arguments


class DeviceMeshVariable(SourcedVariable, ContextVariable):
    kind = "mesh"
    members = table(
        bake="""
            ndim shape device_type mesh_dim_names size get_coordinate get_rank get_local_rank
            __getitem__ _flatten _is_current_rank_part_of_mesh _sym_get_coordinate _get_mesh_dim_by_name
            _get_root_mesh_dim _device_type _mesh_dim_names _thread_id _coordinate_on_dim _stable_hash
            __repr__ __str__ __hash__ __eq__ __ne__ __format__
        """,
        operator="mesh",
        make="from_group _unflatten _concatenate _get_all_submeshes __copy__ __deepcopy__",
        read="_layout _rank_map _flatten_rank_map _root_mesh _pg_registry _flatten_mapping _dim_group_names",
        inline="get_group get_all_groups _get_or_create_default_group _get_root_mesh _hash_key",
        breaks={
            "mesh-entered-by-hand": "__enter__ __exit__",
            "group-lifetime": "abort",
            "object-state": "__getstate__ __setstate__ __setattr__ __delattr__ __dict__",
        },
    )
    functions = {"__copy__": copy.copy, "__deepcopy__": copy.deepcopy}

    @classmethod
    def track(
        cls, tx: Translator, proxy: Any, value: Any, source: Source | None, options: Mapping[str, Any]
    ) -> VariableTracker:
        leave_to_python(DeviceMesh)
        return super().track(tx, proxy, value, source, options)

    @classmethod
    def guard(cls, source: Source) -> None:
        guard_mesh_by_value(source)

    def begin(self) -> Callable[[], None]:
        return enter_mesh(self.as_python_constant())

    def read_member(self, tx: Translator, name: str) -> VariableTracker:
        if name == "mesh":
            ranks = self.as_python_constant().mesh
            return emit_call(tx, constant_tensor, ranks.tolist(), ranks.dtype)
        return super().read_member(tx, name)

    def make(
        self, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        try:
            real_args, real_kwargs = real_arguments(args, kwargs)
        except NotImplementedError:
            self.refuse(name)
        return make_once(
            tx, f"DeviceMesh.{name}", self.real_function(name), real_args, real_kwargs, owner=self.as_python_constant()
        )
