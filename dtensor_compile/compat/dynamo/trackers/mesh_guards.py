"""Guards of meshes: every place where a program finds a mesh has a guard in C++ that it is equal to the traced mesh.

torch guards the first place by a function in Python, and the others by identity with the first one: one Python function
for all of them, which is made from text, and called with each call of the program. The hooks of tensor parallel
styles hold the mesh, so that each layer of a Llama has eleven such places.

Where a program asks whether two meshes are one object, their places are guarded by identity too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._guards import Source
from torch.distributed.device_mesh import DeviceMesh

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import needs, patch

_SAME = patch("torch._dynamo.variables.builder:make_dupe_guard", "obj_source dupe_source", optional=True)
_EQUAL = patch("torch._dynamo.guards:GuardBuilder.OPAQUE_OBJ_GUARD_FN_MATCH", "self guard", optional=True)
_IS = patch("torch._dynamo.variables.builtin:vt_identity_compare", "left right", optional=True)

_Create = Callable[..., Any]


@dataclass
class _Places:
    """The further places of a mesh, each with the guard on its identity that it does not have yet."""

    compared: bool = False
    others: list[tuple[Source, _Create]] = field(default_factory=list)


def _meshes() -> dict[Source, _Places]:
    """By the first place of each mesh in the frame that is being traced."""
    return vars(InstructionTranslator.current_tx().output).setdefault("dtensor_compile_meshes", {})


def guard_mesh_by_value(source: Source) -> None:
    """Further places of the mesh that `source` leads to are guarded by equality."""
    _meshes().setdefault(source, _Places())


@needs(
    "meshes are guarded by equality, in C++",
    _SAME,
    _EQUAL,
    _IS,
    without="calls of programs with tensor parallel styles check meshes in Python, and take longer to compile",
    upstream="not reported: guards on the identity of objects are a function in Python that is made from text",
    remove_when="guards on the identity of objects are made in linear time, and opaque objects are compared in C++",
)
@contextlib.contextmanager
def meshes_guarded_by_value() -> Iterator[None]:
    """While active, the meshes of `guard_mesh_by_value` are guarded so."""

    def same(stock: Any, obj_source: Source, dupe_source: Source | None) -> _Create | None:
        identity: _Create | None = stock(obj_source, dupe_source)
        places = _meshes().get(dupe_source) if dupe_source is not None and dupe_source != obj_source else None
        if places is None or (places.compared and identity is not None):
            return identity
        if identity is not None:
            places.others.append((obj_source, identity))
        return GuardBuilder.OPAQUE_OBJ_GUARD_FN_MATCH

    def equal(stock: Any, self: GuardBuilder, guard: Any) -> None:
        mesh = self.get(guard)
        if not isinstance(mesh, DeviceMesh):
            stock(self, guard)
            return
        code = get_verbose_code_parts(f"{self.arg_ref(guard)} == {mesh}", guard)
        self.get_guard_manager(guard).add_equals_match_guard(mesh, code, guard.user_stack)

    def identical(stock: Any, left: VariableTracker, right: VariableTracker) -> Any:
        known = _meshes()
        sources = [source for variable in (left, right) if (source := variable.source) in known and source is not None]
        if len(sources) == 2:
            _guard_identity([known[source] for source in sources])
            if left is not right and left.as_python_constant() == right.as_python_constant():
                # Others that are equal to these may be one object.
                install_guard(*(source.make_guard(GuardBuilder.ID_MATCH) for source in sources))
        return stock(left, right)

    with patched(_SAME, same), patched(_EQUAL, equal), patched(_IS, identical):
        yield


def _guard_identity(meshes: Sequence[_Places]) -> None:
    for places in meshes:
        places.compared = True
        while places.others:
            source, identity = places.others.pop()
            install_guard(source.make_guard(identity))
