"""``DeviceMesh``.

torch guards a mesh by its ranks, layout, device type, dim names and thread. Shape, coordinates and slices follow from those, for
the process that compiles. Slices and flattened meshes are made while tracing, once, and are constants of the compiled code: each
would be a new object on each call of the eager program, equal to the others. Members that make process groups are called once per
place of the program (``factories.py``). ``mesh.mesh`` is a tensor of constants. ``with mesh:`` makes it the current one for
what is
traced inside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.compat.dynamo import Translator, VariableTracker, build, member_function, never_trace
from dtensor_compile.compat.dynamo_calls import ContextVariable, constant_tensor, emit_call
from dtensor_compile.variables.factories import enter_mesh, make_once, real_arguments
from dtensor_compile.variables.members import SourcedVariable, table

#: Members that make meshes, some with groups of their own. (``copy`` and ``deepcopy`` ask for two of them; the second with a dict
#: of what was copied already.)
_MAKERS: Mapping[str, Callable[..., Any]] = {
    "_unflatten": lambda mesh, *args, **kwargs: mesh._unflatten(*args, **kwargs),
    "_get_all_submeshes": lambda mesh, *args, **kwargs: mesh._get_all_submeshes(*args, **kwargs),
    "__copy__": copy.copy,
    "__deepcopy__": copy.deepcopy,
}


class DeviceMeshVariable(SourcedVariable, ContextVariable):
    kind = "mesh"
    members = table(
        bake="""
            ndim shape device_type mesh_dim_names size get_coordinate get_rank get_local_rank
            __getitem__ _flatten _is_current_rank_part_of_mesh _sym_get_coordinate _get_mesh_dim_by_name _get_root_mesh_dim
            _device_type _mesh_dim_names _thread_id _coordinate_on_dim _stable_hash
            __repr__ __str__ __hash__ __eq__ __ne__ __format__
        """,
        read="_layout _rank_map _flatten_rank_map _root_mesh _pg_registry _flatten_mapping _dim_group_names",
        inline="get_group get_all_groups _get_or_create_default_group _get_root_mesh _hash_key",
    )

    def begin(self) -> Callable[[], None]:
        return enter_mesh(self.as_python_constant())

    def read_member(self, tx: Translator, name: str) -> VariableTracker:
        if name == "mesh":
            ranks = self.as_python_constant().mesh
            return emit_call(tx, constant_tensor, ranks.tolist(), ranks.dtype)
        if name in _MAKERS:
            return member_function(self, name, lambda args, kwargs: self.call_method(tx, name, args, kwargs))
        return super().read_member(tx, name)

    def call_obj_hasattr(self, tx: Translator, name: str) -> VariableTracker:
        return build(tx, True) if name in _MAKERS else super().call_obj_hasattr(tx, name)

    def call_method(
        self, tx: Translator, name: str, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
    ) -> VariableTracker:
        if name not in _MAKERS:
            return super().call_method(tx, name, args, kwargs)
        if name == "__deepcopy__":
            args = []
        try:
            real_args, real_kwargs = real_arguments(args, kwargs)
        except NotImplementedError:
            self.refuse(name)
        mesh = self.as_python_constant()
        return make_once(tx, f"DeviceMesh.{name}", _MAKERS[name], [mesh, *real_args], real_kwargs)

    def refuse(self, name: str) -> NoReturn:
        never_trace(DeviceMesh.__init__)  # the member runs in Python, and torch cannot trace a mesh that is half made
        super().refuse(name)
