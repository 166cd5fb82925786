"""Keys of torch's caches of compiled graphs, the same in every process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.compat.hooks import hook, needs
from dtensor_compile.compat.mesh import mesh_dims, rank_map


@needs(
    "graphs kept in caches from process to process",
    hook("torch._inductor.codecache:FxGraphCachePickler._reduce_fake_script_object", "self t"),
    without="programs with a mesh compile anew in each process",
)
@contextlib.contextmanager
def meshes_by_layout() -> Iterator[None]:
    """While it is entered, keys of caches name a device mesh by its layout.

    Torch pickles the object, and with it Python's hash of its names, which is another one in every process: no program with a
    mesh among its inputs would ever be found.
    """
    from torch._inductor.codecache import FxGraphCachePickler, _ident

    stock = FxGraphCachePickler._reduce_fake_script_object

    def reduce(self: FxGraphCachePickler, value: FakeScriptObject) -> tuple[Any, ...]:
        mesh = value.real_obj
        if not isinstance(mesh, DeviceMesh):
            return stock(self, value)
        layout = (mesh.device_type, mesh.mesh_dim_names, mesh_dims(mesh), rank_map(mesh))
        return _ident, ((value.script_class_name, repr(layout)),)

    with mock.patch.object(FxGraphCachePickler, "_reduce_fake_script_object", reduce):
        yield
