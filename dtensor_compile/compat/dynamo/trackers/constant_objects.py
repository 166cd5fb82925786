"""Meshes, process groups and placements as constants where torch cannot carry them in a graph, as on 2.11.

Since 2.13 they are *opaque objects*: meshes and groups are inputs of the graph, placements constants. On 2.11 torch's
trackers support only a few of their members, and none can be an argument of a node. While our backend traces, our
trackers replace them there: each object is a constant, and an attribute of the graph's module where a node uses it.
Guards are those of 2.13: everything that makes two meshes or placements equal, and the type of a group
(`variables.process_group` adds the rest).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import distributed
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.patches import if_there, needs, patch

_OPAQUE = "torch._library.opaque_object:"
#: Whether torch itself carries these objects in graphs.
OPAQUE: bool = (if_there(_OPAQUE + "is_custom_class") or if_there(_OPAQUE + "is_opaque_type"))(DeviceMesh)


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    sub: type
    for sub in cls.__subclasses__():
        yield from _with_subclasses(sub)


def constant_classes() -> tuple[type, ...]:
    """The classes of such objects, except those that a program derives from placements."""
    return DeviceMesh, Shard, Replicate, Partial, _StridedShard, _MaskPartial, *_with_subclasses(ProcessGroup)


class ConstantObjectVariable(UserDefinedObjectVariable):
    """Tracks such an object, either guarded by `guard_constant` or made by the program."""

    def __init__(self, proxy: Any, value: Any, source: Any = None, **options: Any) -> None:
        super().__init__(value, source=source, **options)

    def as_python_constant(self) -> Any:
        return self.value

    def as_proxy(self) -> Any:
        return _attribute(InstructionTranslator.current_tx().output, self.value)

    def is_python_hashable(self) -> bool:
        return True

    def get_python_hash(self) -> int:
        return hash(self.value)

    def is_python_equal(self, other: object) -> bool:
        return isinstance(other, VariableTracker) and self.value == other.as_python_constant()


class ConstantClassVariable(UserDefinedClassVariable):
    """Tracks the class of such objects, which are constructed while tracing."""

    def call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        real = (
            [arg.as_python_constant() for arg in args],
            {name: arg.as_python_constant() for name, arg in kwargs.items()},
        )
        return VariableTracker.build(tx, self.value(*real[0], **real[1]))


#: torch's trackers of such classes.
STOCK_CLASSES: tuple[type, ...] = (
    UserDefinedClassVariable,
    *(cls for name in ("PlacementClassVariable",) if (cls := getattr(distributed, name, None))),
)


def _attribute(output: Any, value: Any) -> Any:
    """The proxy of an object in the graph that is being traced; a branch or a checkpointed region has a graph of its
    own."""
    names = vars(output).setdefault("dtensor_compile_names", {})
    if id(value) not in names:
        names[id(value)] = f"dtensor_compile_{type(value).__name__}_{len(names)}"
        output.nn_modules[names[id(value)]] = value
    made = vars(output.current_tracer).setdefault("dtensor_compile_made", {})
    if id(value) not in made or made[id(value)].node._erased:  # the node was rolled back
        made[id(value)] = output.create_proxy("get_attr", names[id(value)], (), {})
        made[id(value)].node.meta["example_value"] = value
    return made[id(value)]


def guard_constant(builder: VariableBuilder, value: Any) -> None:
    """Installs the guards that torch has for such an input since 2.13."""
    builder.install_guards(GuardBuilder.TYPE_MATCH if isinstance(value, ProcessGroup) else GuardBuilder.EQUALS_MATCH)


_WORLD = patch("torch._dynamo.variables.distributed:WorldMetaClassVariable.var_getattr", "self tx name", optional=True)


@needs(
    "the default process group as a constant, before 2.13",
    _WORLD,
    without="a program that reads it breaks the graph",
    upstream="fixed in 2.13, where groups are opaque objects",
    remove_when="2.11 is no longer supported",
)
@contextlib.contextmanager
def track_world() -> Iterator[None]:
    """While active, ``torch.distributed.group.WORLD`` has the same tracker as any other group."""

    def var_getattr(stock: Any, self: Any, tx: Any, name: str) -> VariableTracker:
        found = stock(self, tx, name)  # guards on this group
        return VariableTracker.build(tx, self.value.WORLD, AttrSource(self.source, name)) if name == "WORLD" else found

    with patched(_WORLD, var_getattr):
        yield
