"""Graphs: taking back a change, what is noted on nodes while they are traced, and running one operator by operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import traceback as fx_traceback
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy


class SavedNode(NamedTuple):
    """A node as it was."""

    node: torch.fx.Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    type: Any
    meta: dict[str, Any]


SavedGraph = tuple[SavedNode, ...]


def copy_of_graph(graph: torch.fx.Graph) -> SavedGraph:
    """What `put_back` needs to make `graph` again what it is now; metadata is shared value by value.

    Takes a microsecond a node, as most changes are never taken back; nodes are made when one is.
    """
    return tuple(SavedNode(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta)) for n in graph.nodes)


def put_back(graph: torch.fx.Graph, saved: SavedGraph) -> None:
    """Makes `graph` what it was, with the same node names, whatever state it is in. Nodes of `graph` held elsewhere are
    void.
    """
    copy, made = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for was in saved:
        args, kwargs = map_arg((was.args, was.kwargs), made.__getitem__)
        node = copy.create_node(was.op, was.target, args, kwargs, was.name, was.type)
        node.meta = dict(was.meta)
        made[was.node] = node
    for name in ("_root", "_len", "_graph_namespace", "_insert", "_find_nodes_lookup_table"):
        setattr(graph, name, getattr(copy, name))
    for node in [graph._root, *graph.nodes]:
        node.graph = graph
    graph.inserting_before(graph._root)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """While active, operators run as outside of any tracing: on real tensors, and nobody looks."""
    return _disable_current_modes()


def first_token() -> torch.Tensor:
    """What operators with effects pass on first; real, also while tensors are made fake."""
    with unset_fake_temporarily():
        return torch.empty(0)


def as_fake_as(value: object) -> contextlib.AbstractContextManager[object]:
    """While active, tensors that are made from nothing are fake if `value` is, and of the same trace."""
    return value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext()


def is_fake(value: object) -> bool:
    """Whether a tensor has no values: it stands for one while tracing."""
    return isinstance(value, FakeTensor)


@contextlib.contextmanager
def recomputed_in_backward(wanted: bool) -> Iterator[None]:
    """Nodes that are traced while it is entered run again in the backward instead of keeping their results, if
    `wanted`.
    """
    meta = fx_traceback.current_meta  # what this thread notes on nodes that it traces
    before = meta.get("recompute")
    if wanted:
        meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    try:
        yield
    finally:
        if wanted and before is None:
            meta.pop("recompute", None)
        elif wanted:
            meta["recompute"] = before


class BoxedCode(CodeGen):
    """Python code of a graph that takes its inputs as one list and empties it, so that each is freed after its last
    use.

    before   def forward(self, x, w):            the caller holds x and w until it returns
    after    def forward(self, inputs): x, w, = inputs; inputs.clear()
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: Any) -> str:
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars if variable != "self"]
        taken = f"\n    {', '.join(names)}, = inputs_\n    inputs_.clear()" if names else ""
        return f"def {self._func_name}(self, inputs_){maybe_return_annotation}:{taken}"


def run_boxed(graph_module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A function of a list of inputs, which it empties, that runs `graph_module` operator by operator."""
    graph_module.graph.set_codegen(BoxedCode())
    graph_module.recompile()
    forward = graph_module.forward

    def run(inputs: list[Any]) -> Any:
        return forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
