"""Fake values of lowered nodes are computed once.

After its post-grad passes, Inductor runs the operators of all nodes that are new or have other arguments again with
fake tensors, and those of all nodes that depend on them. Every node that our steps make has its value
(`graph/node_builder.py`), and a node that they give another argument keeps its own: once redistributions are lowered,
nearly the whole graph would be run to find the values that it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dtensor.specs import storage_of
from dtensor_compile.compat.patches import feature, hook, patch

_UPDATE = patch("torch._inductor.fx_utils:FakeTensorUpdater.incremental_update", "self")
_SAME = patch("torch._inductor.fx_utils:_is_fake_tensor_same", "new old existing_storages ...", optional=True)
_KNOWN = feature(
    "values of lowered nodes are computed once",
    _UPDATE,
    _SAME,
    hook("torch._inductor.fx_utils:FakeTensorUpdater.hash_node", "self node"),
    hook("torch._inductor.fx_utils:FakeTensorUpdater.__init__", "self gm"),
    without="programs take a few percent longer to compile",
    upstream="not reported: a custom pass cannot say that it keeps values; a value counts as another than itself",
    remove_when="FakeTensorUpdater leaves nodes alone whose values a custom pass has set",
)


class KnownValues:
    """The nodes of lowered graphs whose values hold as long as Inductor does not change them."""

    def __init__(self) -> None:
        self._nodes: dict[torch.fx.Graph, list[Any]] = {}

    def keep(self, graph: torch.fx.Graph) -> None:
        """Notes the nodes of a graph with static shapes, and their arguments.

        With symbolic sizes, Inductor replaces those for which the values of new nodes were computed by equal ones.
        """
        if not _KNOWN.works():
            return
        from torch._inductor.fx_utils import FakeTensorUpdater

        nodes = [node for node in graph.nodes if "val" in node.meta]
        if any(_is_symbolic(value) for node in nodes for value in pytree.tree_leaves(node.meta["val"])):
            return
        state = cast("FakeTensorUpdater", None)  # of which the function needs nothing
        self._nodes[graph] = [FakeTensorUpdater.hash_node(state, node) for node in nodes if not _is_of_another(node)]

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """While active, Inductor computes the values of the nodes that it has changed since, and of their users.

        A value is also the same as itself: torch compares storages such that none is, and computes the result of each
        call of a graph anew although the graph returns what it did.
        """
        if not _KNOWN.works():
            yield
            return

        def update(stock: Any, updater: Any) -> int:
            updater.processed_hashes.update(self._nodes.pop(updater.gm.graph, ()))
            return cast("int", stock(updater))

        def same(stock: Any, new: Any, old: Any, *args: Any, **kwargs: Any) -> bool:
            return new is old or cast("bool", stock(new, old, *args, **kwargs))

        with patched(_UPDATE, update), patched(_SAME, same):
            yield


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value._has_symbolic_sizes_strides
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_of_another(node: torch.fx.Node) -> bool:
    """Whether the value of a view is one of another tensor than its argument's: a step has replaced a copy by what it
    was a copy of, for instance."""
    value = node.meta["val"]
    if not getattr(node.target, "is_view", False) or not isinstance(value, torch.Tensor):
        return False
    return storage_of(value) != storage_of(node.all_input_nodes[0].meta["val"])
