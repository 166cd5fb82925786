"""Fake values of lowered nodes are computed once.

After its post-grad passes, Inductor runs the operators of all nodes that are new or have other arguments again with
fake tensors, and those of all nodes that depend on them. Every node that our steps make has its value
(`graph/node_builder.py`), and a node that they give another argument keeps its own: once redistributions are lowered,
nearly the whole graph would be run to find the values that it has.

Before them, Inductor runs all operators of the graph once more, since its passes over the joint graph may have left
values that are wrong. Those that were right where these passes began, and depend on nothing that they changed, still
are.

Twice per graph Inductor also collects the values of the arguments of each node before it asks whether a node changed:
as long as none did, there is nothing to collect them for.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from dtensor_compile.compat.aot.fx import CALL, is_functional, returns_new_tensors
from dtensor_compile.compat.apply_patches import patched
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
_PROPAGATE = patch("torch.fx.passes.fake_tensor_prop:FakeTensorProp.run_node", "self n")
_RIGHT = feature(
    "values of traced nodes are computed once",
    _PROPAGATE,
    without="programs take a few percent longer to compile",
    upstream="not reported: all operators of a graph are run again for those that passes over the joint graph change",
    remove_when="passes over the joint graph keep values right, and Inductor relies on them",
)
#: In the metadata of a node: its target and arguments when its value was known to be right.
_TRACED = "dtensor_compile_traced"


class KnownValues:
    """The nodes of the graph that was lowered last, whose values hold as long as Inductor does not change them."""

    def __init__(self) -> None:
        self._graph: torch.fx.Graph | None = None
        self._nodes: list[Any] = []

    def keep(self, graph: torch.fx.Graph) -> None:
        """Notes the nodes of a graph with static shapes, and their arguments.

        With symbolic sizes, Inductor replaces those for which the values of new nodes were computed by equal ones.
        """
        if not _KNOWN.works() or not _is_static(graph):
            return
        from torch._inductor.fx_utils import FakeTensorUpdater

        state = cast("FakeTensorUpdater", None)  # of which the function needs nothing
        nodes = (node for node in graph.nodes if "val" in node.meta)
        self._graph, self._nodes = graph, [FakeTensorUpdater.hash_node(state, node) for node in nodes]

    def trust(self, graph: torch.fx.Graph) -> None:
        """Notes on the nodes of a graph with static shapes that their values are right; copies have the note."""
        for node in graph.nodes if _RIGHT.works() and _is_static(graph) else ():
            if node.target is operator.getitem or is_functional(node.target):
                node.meta[_TRACED] = _text_of(node)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """While active, Inductor computes the values of the nodes that it has changed since, and of their users.

        A value is also the same as itself: torch compares storages such that none is, and computes the result of each
        call of a graph anew although the graph returns what it did.
        """

        def update(stock: Any, updater: Any) -> int:
            if updater.gm.graph is self._graph:
                updater.processed_hashes.update(self._nodes)
                self._graph, self._nodes = None, []
            return 0 if _is_unchanged(updater) else cast("int", stock(updater))

        def same(stock: Any, new: Any, old: Any, *args: Any, **kwargs: Any) -> bool:
            return new is old or cast("bool", stock(new, old, *args, **kwargs))

        with contextlib.ExitStack() as stack:
            if _KNOWN.works():
                stack.enter_context(patched(_UPDATE, update))
                stack.enter_context(patched(_SAME, same))
            if _RIGHT.works():
                stack.enter_context(patched(_PROPAGATE, _run_node))
            yield


def _text_of(node: torch.fx.Node) -> tuple[Any, ...]:
    return node.target, *map_arg((node.args, node.kwargs), lambda source: source.name)


def _run_node(stock: Any, interpreter: Any, node: torch.fx.Node) -> Any:
    """Runs a node on fake tensors, unless its value is known to be right.

    The value that it has is kept where it is one of the same layout: later nodes may be views of it. A view that has to
    be run is one of another value, and so are those of its users.
    """
    right = vars(interpreter).setdefault("dtensor_compile_right", set())
    old, text = node.meta.get("val"), node.meta.pop(_TRACED, None)
    if text == _text_of(node) and right.issuperset(node.all_input_nodes) and _same_layout(old, old, interpreter):
        right.add(node)
        return old
    result = stock(interpreter, node)
    new = node.op == "placeholder" or node.target is CALL or returns_new_tensors(node.target)
    if new and _same_layout(old, result, interpreter):
        node.meta["val"] = old
        right.add(node)
        return old
    return result


def _same_layout(old: Any, new: Any, interpreter: Any) -> bool:
    """Whether two results are fake tensors of the interpreter's mode with the same sizes, strides and so on."""
    if isinstance(old, (list, tuple)):
        same = isinstance(new, (list, tuple)) and len(old) == len(new)
        return same and all(_same_layout(one, other, interpreter) for one, other in zip(old, new))
    if not all(type(value) is FakeTensor and value.fake_mode is interpreter._mode for value in (old, new)):
        return False
    return not _is_symbolic(old) and not _is_symbolic(new) and _layout_of(old) == _layout_of(new)


def _layout_of(value: torch.Tensor) -> tuple[Any, ...]:
    strides = (value.stride(), value.storage_offset()) if value.layout == torch.strided else ()
    return value.layout, value.shape, strides, value.dtype, value.device


def _is_unchanged(updater: Any) -> bool:
    """Whether the nodes of a graph, and of the graphs that it calls, are those that `updater` knows.

    It then knows these nodes alone, as after an update. False also where graphs are called by other operators than that
    of blocks, or where values that a graph is called with are laid out otherwise than its placeholders.
    """
    module, known = updater.gm, updater.processed_hashes
    hashes = {node: updater.hash_node(node) for node in module.graph.nodes}
    if not all(hash in known for node, hash in hashes.items() if node.op == "call_function"):
        return False
    found = ((node, getattr(module, str(node.target), None)) for node in module.graph.find_nodes(op="get_attr"))
    graphs = {node: graph for node, graph in found if graph is not None and graph in updater.subgraph_updaters}
    if not all(call.target is CALL and _fits(call, graph) for node, graph in graphs.items() for call in node.users):
        return False
    if not all(map(_is_unchanged, updater.subgraph_updaters.values())):
        return False
    known.clear()
    known.update(hashes.values())
    return True


def _fits(call: torch.fx.Node, graph: torch.fx.GraphModule) -> bool:
    """Whether a graph is called with values that are laid out as its placeholders."""
    from torch._inductor.fx_utils import _is_fake_tensor_same

    given, placeholders = call.args[2:], graph.graph.find_nodes(op="placeholder")
    if len(given) != len(placeholders):
        return False
    return all(
        isinstance(node, torch.fx.Node)
        and "val" in node.meta
        and _is_fake_tensor_same(node.meta["val"], inner.meta["val"], {}, check_storage=False)
        for node, inner in zip(given, placeholders)
    )


def _is_static(graph: torch.fx.Graph) -> bool:
    values = (value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val")))
    return not any(map(_is_symbolic, values))


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value._has_symbolic_sizes_strides
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
