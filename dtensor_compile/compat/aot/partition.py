"""Values that AOTAutograd saves for the backward: symbols of shard sizes, states of random generators, view bases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch._functorch import partitioners
from torch.fx.experimental.symbolic_shapes import free_symbols

from dtensor_compile.compat.aot.random_state import draws, saves_state, takes_random_state
from dtensor_compile.compat.apply_patches import patched
from dtensor_compile.compat.dynamo.trackers.constant_objects import OPAQUE
from dtensor_compile.compat.patches import hook, needs, patch

_BINDINGS = patch("torch._functorch.partitioners:find_symbol_binding_fx_nodes", "graph")
_RANDOM = patch("torch._functorch.partitioners:functionalize_rng_ops", "joint_module fw_module bw_module num_sym_nodes")
_EXTRACT = patch("torch._functorch.partitioners:_extract_fwd_bwd_modules", "joint_module saved_values ...")
_REORDER = patch("torch._functorch.partitioners:reordering_to_mimic_autograd_engine", "gm")


@needs(
    "symbolic sizes of shards in the backward pass",
    _BINDINGS,
    without="some dynamic shapes are an error of the compilation",
    upstream="#152963",
    remove_when="the partitioner binds the symbols of a DTensor's local sizes for the backward graph",
)
@contextlib.contextmanager
def bind_shard_sizes() -> Iterator[None]:
    """While active, partitioning on this thread passes local sizes to the backward graph where it needs them.

    A DTensor input brings its global sizes as integers of the graph, but not those of its local tensor, which have
    symbols of their own (sharding of a global size depends on the rank). If the shape of a saved tensor contains such a
    symbol, ``3*s3``, nothing in the backward graph defines ``s3``, and Inductor refuses the graph. The size becomes a
    node of the joint graph, saved like others.
    """

    def find(stock: Any, graph: torch.fx.Graph) -> dict[sympy.Symbol, torch.fx.Node]:
        bindings = stock(graph)
        return {**_sizes_of_inputs(graph, set(bindings)), **bindings}

    with patched(_BINDINGS, find):
        yield


@needs(
    "random numbers in recomputed regions",
    _RANDOM,
    *([hook("torch._functorch.partitioners:is_opaque_node", "node")] if OPAQUE else []),
    without="such regions with a mesh are an error",
    upstream="not reported: it takes an opaque mesh among the saved tensors of a recomputed region",
    remove_when="functionalize_rng_ops saves states of generators before opaque objects",
)
@contextlib.contextmanager
def place_random_states() -> Iterator[None]:
    """While active, partitioning on this thread saves generator states among the tensors.

    If a recomputed region draws random numbers, the forward graph saves the generator's state. torch puts it after the
    saved opaque objects, such as the mesh of a DTensor, whereas AOTAutograd expects all saved tensors before those.

        before   return (out, saved, mesh, state)      def backward(saved, mesh, state, tangent)
        after    return (out, saved, state, mesh)      def backward(saved, state, mesh, tangent)
    """

    def place(
        stock: Any, joint: Any, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, symbols: int
    ) -> Any:
        known = backward.graph.find_nodes(op="placeholder")
        saved = [node for node in known if not str(node.target).startswith("tangents")]
        opaque = [node for node in saved if OPAQUE and partitioners.is_opaque_node(node)]
        values = [(part, [node.meta["val"] for node in _draws(part)]) for part in (forward, backward)]
        forward, backward = stock(joint, forward, backward, symbols + len(opaque))
        for part, known_values in values:
            for node, value in zip(_draws(part), known_values, strict=True):
                _set_value(node, value)
        for state in [node for node in backward.graph.find_nodes(op="placeholder") if opaque and node not in known]:
            opaque[0].prepend(state)
        backward.recompile()
        return forward, backward

    with patched(_RANDOM, place):
        yield


def _draws(part: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in part.graph.nodes if draws(node.target)]


def _set_value(node: torch.fx.Node, value: Any) -> None:
    """Gives a node that draws with a state of the generator the fake value of the node that it stands for, as torch
    does not."""
    if "val" in node.meta or not takes_random_state(node.target):
        return
    if not saves_state(node.target):
        node.meta["val"] = value
        return
    state = None
    for part in node.users:  # the state has its value
        known = part.meta.setdefault("val", value)
        state = known if part.args[1] == 0 else state
    node.meta["val"] = state, value


@needs(
    "view bases in place of views among saved tensors",
    _EXTRACT,
    without="a call of a block that is compiled once has nodes for the views that it saves",
    upstream="not reported: of no use where the graph around is compiled as well",
    remove_when="the partitioner can be told to save view bases",
)
@contextlib.contextmanager
def bases_saved(base_of: Callable[[torch.fx.Node], torch.fx.Node]) -> Iterator[None]:
    """While active, partitioning on this thread saves the view base of a tensor, and the backward graph makes the view.

    before   return (out, view(y))      def backward(v, tangent)
    after    return (out, y)            def backward(y, tangent): v = view(y)

    Args:
        base_of: the view base of a node; the node itself if it is no view.
    """

    def extract(stock: Any, joint: torch.fx.GraphModule, saved: list[torch.fx.Node], *args: Any, **kwargs: Any) -> Any:
        return stock(joint, list(dict.fromkeys(map(base_of, saved))), *args, **kwargs)

    with patched(_EXTRACT, extract):
        yield


class HeldNodes:
    """Keeps nodes of the joint graph in the forward or backward across Inductor's own passes.

    Inductor removes a multiplication by one (on 2.14 also by the number 1) and overwrites the metadata of the preceding
    node with that of the multiplication. The partitioner would then move such a node from backward to forward if it
    needs no tangent, as on a rank outside of the mesh of the gradient, but not on ranks of that mesh.
    """

    def __init__(self) -> None:
        self._tags: dict[torch.fx.Node, dict[str, Any]] = {}

    def remember(self, graph: torch.fx.Graph) -> None:
        held = [
            node
            for node in graph.nodes
            if node.meta.get("partitioner_tag") in ("must_be_in_backward", "must_be_in_forward")
        ]
        self._tags = {
            node: {key: node.meta[key] for key in ("partitioner_tag", "recompute") if key in node.meta} for node in held
        }

    def restore(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            node.meta.update(self._tags.get(node, {}))
        self._tags = {}


def _copy_but_groups(self: torch.fx.GraphModule, memo: dict[int, Any]) -> torch.fx.GraphModule:
    memo.update({id(value): value for value in vars(self).values() if isinstance(value, torch.ScriptObject)})
    return torch.fx.GraphModule.__deepcopy__(self, memo)


@needs(
    "groups of messages of convolutions, before 2.13",
    _REORDER,
    without="the backward pass of such a convolution is an error of the compilation",
    upstream="fixed in 2.13, where groups are opaque inputs",
    remove_when="2.11 is no longer supported",
)
@contextlib.contextmanager
def share_groups() -> Iterator[None]:
    """While active, copies of a backward graph that is partitioned on this thread share its process groups.

    torch compiles a copy of it. Before 2.13, groups for the messages of a convolution are attributes of the graph,
    which cannot be copied.
    """
    if OPAQUE:
        yield
        return

    def reorder(stock: Any, backward: torch.fx.GraphModule) -> torch.fx.GraphModule:
        reordered = stock(backward)  # the last step of the partitioner
        type(reordered).__deepcopy__ = _copy_but_groups  # each graph module has a class of its own
        return reordered

    with patched(_REORDER, reorder):
        yield


def _sizes_of_inputs(graph: torch.fx.Graph, bound: set[sympy.Symbol]) -> dict[sympy.Symbol, torch.fx.Node]:
    """New nodes for input sizes, by symbol: one for each symbol not in `bound` that is a size of an input."""
    inputs = graph.find_nodes(op="placeholder")
    made: dict[sympy.Symbol, torch.fx.Node] = {}
    with graph.inserting_after(inputs[-1]):
        for node in inputs:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or node.target.startswith("tangents"):
                continue
            for dim, size in enumerate(value.shape):
                symbols = free_symbols(size)
                if (
                    isinstance(size, torch.SymInt)
                    and len(symbols) == 1
                    and (symbol := next(iter(symbols))) == size.node.expr
                    and symbol not in {*bound, *made}
                ):
                    made[symbol] = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                    made[symbol].meta["val"] = size
    return made
