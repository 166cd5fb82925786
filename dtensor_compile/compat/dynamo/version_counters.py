"""``torch.autograd._unsafe_preserve_version_counter`` in a region, as Dynamo sees it while it traces for our backend.

torch:  writes the version before into the graph and sets it there, on values that AOTAutograd made functional: inputs
keep nothing of it
        (and a DTensor has no such operator, which is an error)
here:   notes which nodes ran in the context manager, and for which tensors; see `fixups.preserved_versions`
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
from dtensor_compile.compat.dynamo.tracker_tools import Translator, items_of
from dtensor_compile.compat.patches import hook, needs, patch

_KEY = "dtensor_compile_preserved_versions"


def memory_named(value: Any) -> int | None:
    """What names the memory of a value that was traced, or of its local tensor; None where it has none."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    return storage_of(local) if isinstance(local, torch.Tensor) and local.layout is torch.strided else None


def preserved_by(node: torch.fx.Node) -> set[int]:
    """The memory (`memory_named`) whose versions a node of a Dynamo graph leaves as they are."""
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
    """While active, frames that are compiled for our backend know which of their nodes preserve versions."""

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
    """The nodes before each context manager that the program is in, in the order in which it entered them."""
    return vars(tx.output).setdefault(_KEY, [])


def _restored(tx: Translator) -> dict[int | None, tuple[VariableTracker, int]]:
    """Of DTensors that a context manager was left for, by their memory: the version that it preserved, and that of the
    fake tensor then.
    """
    return vars(tx.output).setdefault(f"{_KEY}_restored", {})


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Gives tensors those versions."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))
