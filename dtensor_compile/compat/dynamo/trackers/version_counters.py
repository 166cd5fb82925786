"""``torch.autograd._unsafe_preserve_version_counter`` inside a region that is traced for our backend.

torch:  writes the version before into the graph and sets it there, on functionalized values: inputs are not affected
        (and DTensor has no such operator, which is an error)
here:   records the nodes that ran in the context manager, and its tensors; see `fixups.preserved_versions`
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import PreserveVersionContextVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dtensor.specs import storage_of
from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator, items_of
from dtensor_compile.compat.patches import hook, needs, patch

_KEY = "dtensor_compile_preserved_versions"


def memory_named(value: Any) -> int | None:
    """An identifier of the storage of a traced value, or of its local tensor; None without a storage."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    return storage_of(local) if isinstance(local, torch.Tensor) and local.layout is torch.strided else None


def preserved_by(node: torch.fx.Node) -> set[int]:
    """The storages (`memory_named`) whose versions a node of a Dynamo graph preserves."""
    return node.meta.get(_KEY, set())


_ENTER = patch("torch._dynamo.variables.ctx_manager:PreserveVersionContextVariable.enter", "self tx")
_EXIT = patch("torch._dynamo.variables.ctx_manager:PreserveVersionContextVariable.exit", "self tx args")
_VERSION = patch("torch._dynamo.variables.tensor:TensorVariable.method_attr__version", "self tx")


@needs(
    "version counters that a program preserves",
    _ENTER,
    _EXIT,
    _VERSION,
    hook("torch._C._autograd:_unsafe_set_version_counter"),
    without="a version is higher than in eager, and such a context of a DTensor is an error",
    upstream="#121086 made it; not reported for DTensors: a private API",
    remove_when="a compiled call leaves versions as they were where all writes are in _unsafe_preserve_version_counter",
)
@contextlib.contextmanager
def versions_preserved_in_the_region() -> Iterator[None]:
    """While active, frames that are compiled for our backend record which of their nodes preserve versions."""

    def enter(stock: Any, self: PreserveVersionContextVariable, tx: Translator) -> VariableTracker:
        _begun(tx).append(next(reversed(tx.output.graph.nodes), None))
        return stock(self, tx)

    def exit(
        stock: Any, self: PreserveVersionContextVariable, tx: Translator, *args: VariableTracker
    ) -> VariableTracker:
        values = [tensor.as_proxy().node.meta.get("example_value") for tensor in items_of(self.tensors)]
        memory = {memory_named(value) for value in values}
        begin = _begun(tx).pop()
        for node in reversed(tx.output.graph.nodes):
            if node is begin:
                break
            node.meta[_KEY] = preserved_by(node) | memory
        if not any(isinstance(value, DTensor) for value in values):
            return stock(self, tx, *args)
        for value, version in zip(values, items_of(self.prev_versions)):
            _restored(tx)[memory_named(value)] = version, value._version
        return ConstantVariable.create(None)

    def version(stock: Any, self: TensorVariable, tx: Translator) -> VariableTracker:
        value = self.as_proxy().node.meta.get("example_value")
        if not isinstance(value, DTensor) or memory_named(value) not in _restored(tx):
            return stock(self, tx)
        restored, then = _restored(tx)[memory_named(value)]
        written_since = ConstantVariable.create(value._version - then)
        return VariableTracker.build(tx, operator.add).call_function(tx, [restored, written_since], {})

    with patched(_ENTER, enter), patched(_EXIT, exit), patched(_VERSION, version):
        yield


def _begun(tx: Translator) -> list[torch.fx.Node | None]:
    """The last nodes before each active context manager of the program, in order of entry."""
    return vars(tx.output).setdefault(_KEY, [])


def _restored(tx: Translator) -> dict[int | None, tuple[VariableTracker, int]]:
    """By storage of DTensors: the version that a context manager preserved, and the version of the fake tensor at its
    exit."""
    return vars(tx.output).setdefault(f"{_KEY}_restored", {})


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Sets the version counters of tensors."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))
