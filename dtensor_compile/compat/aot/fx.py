"""Graphs: undoing a change, metadata that tracing puts on nodes, and running a graph operator by operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx import traceback as fx_traceback
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

#: The operator of higher order that calls a graph: ``(graph, name, *tensors)``.
CALL = torch.ops.higher_order.invoke_subgraph


def is_functional(target: object) -> bool:
    """Whether a target is an operator that writes to no argument, by its schema."""
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable


def returns_new_tensors(target: object) -> bool:
    """Whether a target is an operator of which no result is, or is a view of, an argument, by its schema."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return not any(value.alias_info for value in (*target._schema.returns, *target._schema.arguments))


class SavedNode(NamedTuple):
    """The state of a node."""

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
    """The state of `graph` for `put_back`; metadata dicts are copied, their values shared.

    Takes about a microsecond per node: most changes are never undone, so nodes are only created when one is.
    """
    return tuple(SavedNode(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta)) for n in graph.nodes)


def is_as_saved(graph: torch.fx.Graph, saved: SavedGraph) -> bool:
    """Whether the nodes of `graph`, their targets and their arguments are those of `saved`; quicker than a lint."""
    return len(graph.nodes) == len(saved) and all(
        node is was.node and node.target is was.target and node.args is was.args and node.kwargs is was.kwargs
        for node, was in zip(graph.nodes, saved)
    )


def put_back(graph: torch.fx.Graph, saved: SavedGraph) -> None:
    """Restores `graph`, with the same node names, whatever state it is in. Nodes held elsewhere become invalid."""
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


def rename(node: torch.fx.Node, name: str) -> None:
    """Names a node; a number is appended if another node of its graph has the name."""
    node._rename(name)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """While active, operators run outside of any tracing: on real tensors, unrecorded."""
    return _disable_current_modes()


def first_token() -> torch.Tensor:
    """The first token of effectful operators; real even under a fake mode."""
    with unset_fake_temporarily():
        return torch.empty(0)


class FakeLayout(NamedTuple):
    """What a new tensor that shares its storage with no other one is made of; sizes and strides are numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: object) -> FakeLayout | None:
        """That of a fake tensor; None if it has symbolic sizes, an offset or a gradient, or is another value."""
        if type(value) is not FakeTensor or value.layout is not torch.strided or value._has_symbolic_sizes_strides:
            return None
        if value.storage_offset() or value.requires_grad:
            return None
        return cls(tuple(value.shape), value.stride(), value.dtype, value.device)

    def fake(self, mode: FakeTensorMode) -> FakeTensor:
        """A new fake tensor of `mode`, without a call of an operator."""
        with _disable_current_modes():
            elements = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(mode, elements, self.device)


def as_fake_as(value: object) -> contextlib.AbstractContextManager[object]:
    """While active, new tensors are fake if `value` is, and belong to the same fake mode."""
    return value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext()


def is_fake(value: object) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


@contextlib.contextmanager
def recomputed_in_backward(wanted: bool) -> Iterator[None]:
    """If `wanted`, nodes traced while it is active are recomputed in the backward instead of saved."""
    meta = fx_traceback.current_meta  # metadata for nodes that this thread traces
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
    """Code of a graph that takes its inputs as one list and empties it, so that each is freed after its last use.

    before   def forward(self, x, w):            the caller holds x and w until it returns
    after    def forward(self, inputs): x, w, = inputs; inputs.clear()
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: Any) -> str:
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars if variable != "self"]
        taken = f"\n    {', '.join(names)}, = inputs_\n    inputs_.clear()" if names else ""
        return f"def {self._func_name}(self, inputs_){maybe_return_annotation}:{taken}"


def run_boxed(graph_module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A boxed function (of one list, which it empties) that runs `graph_module` operator by operator."""
    graph_module.graph.set_codegen(BoxedCode())
    graph_module.recompile()
    forward = graph_module.forward

    def run(inputs: list[Any]) -> Any:
        return forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def called_graphs(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """The graphs of blocks that a graph calls, each once."""
    calls = module.graph.find_nodes(op="call_function", target=CALL)
    return list({id(graph): graph for graph in map(called_graph, calls)}.values())


def called_graph(call: torch.fx.Node) -> torch.fx.GraphModule:
    """The graph that a node with `CALL` calls."""
    member = call.args[0]
    assert isinstance(member, torch.fx.Node)
    found = getattr(call.graph.owning_module, str(member.target))
    assert isinstance(found, torch.fx.GraphModule)
    return found
