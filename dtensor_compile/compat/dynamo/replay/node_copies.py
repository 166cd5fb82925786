"""Nodes of one call of a module, copied for a call of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.dynamo.trackers.tracker_tools import Translator

#: Key in ``node.meta`` of a `Place`.
PLACE = "dtensor_compile_place"


class Place(NamedTuple):
    """The call that a node belongs to.

    Attributes:
        trace: number of the trace in its graph.
        call: number of the call among those that share the trace; 0 is the traced one.
        number: of the node among those of the call.
        region: whether the program marks the call as one to compile once.
    """

    trace: int
    call: int
    number: int
    region: bool = False


class Names:
    """Modules in the metadata of nodes, where another module is in the place of one."""

    def __init__(self, tx: Translator, before: torch.nn.Module, after: torch.nn.Module) -> None:
        self.before = str(id(before))
        self.name = tx.nn_module_stack.get(str(id(after)), ("",))[0]
        self.ids = {str(id(one)): str(id(other)) for one, other in zip(before.modules(), after.modules())}

    def meta(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """The metadata of a copy."""
        stack = meta.get("nn_module_stack", {})
        old = stack.get(self.before, ("",))[0]
        if not old or not self.name:
            return dict(meta)
        moved = {
            self.ids.get(key, key): (self.name + path[len(old) :] if path.startswith(old) else path, cls)
            for key, (path, cls) in stack.items()
        }
        return {**meta, "nn_module_stack": moved}

    def graph_module(self, part: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """A copy of a graph that an operator of higher order runs, such as a checkpointed region."""
        graph = torch.fx.Graph()
        values: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in part.graph.nodes:
            values[node] = graph.node_copy(node, lambda n: values[n])
            values[node].meta = self.meta(node.meta)
        return torch.fx.GraphModule(part, graph)


class Fakes:
    """Copies fake tensors; copies share memory where the tensors do."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.storages: dict[int, torch.UntypedStorage] = {}

    def copy(self, value: Any) -> Any:
        """A copy of a fake tensor; anything else as it is."""
        if isinstance(value, DTensor):
            return DTensor(self.copy(value._local_tensor), value._spec, requires_grad=value.requires_grad)
        if not isinstance(value, FakeTensor):
            return value
        whole = value.untyped_storage()
        if whole._cdata not in self.storages:
            whole_copy = torch.empty(whole.nbytes(), dtype=torch.uint8, device="meta")  # of a symbolic size, perhaps
            self.storages[whole._cdata] = whole_copy.untyped_storage()
        with torch.no_grad():
            meta = torch.empty(0, dtype=value.dtype, device="meta")
            meta.set_(self.storages[whole._cdata], value.storage_offset(), value.size(), value.stride())
        return FakeTensor(self.mode, meta, value.fake_device).requires_grad_(value.requires_grad)

    def not_a_leaf(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor as a call returns it: with a gradient function if it requires a gradient."""
        with self.mode, torch.enable_grad():
            return value.view_as(value) if value.requires_grad else value
