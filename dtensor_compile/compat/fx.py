"""Graphs: taking back a change, and what is noted on nodes while they are traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import traceback as fx_traceback
from torch.utils.checkpoint import CheckpointPolicy


def copy_of_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy with the same node names; metadata is shared value by value."""
    copy = torch.fx.Graph()
    result = copy.graph_copy(graph, {}, return_output_node=True)
    if result is not None:
        value, output = result
        copy.output(value).meta = dict(output.meta)
    return copy


def put_back(graph: torch.fx.Graph, saved: torch.fx.Graph) -> None:
    """Makes `graph` what `saved` is, whatever state it is in; `saved` is used up. Nodes of `graph` held elsewhere are void."""
    for name in ("_root", "_len", "_graph_namespace", "_insert", "_find_nodes_lookup_table"):
        setattr(graph, name, getattr(saved, name))
    for node in [graph._root, *graph.nodes]:
        node.graph = graph
    graph.inserting_before(graph._root)


def first_token() -> torch.Tensor:
    """What operators with effects pass on first; real, also while tensors are made fake."""
    with unset_fake_temporarily():
        return torch.empty(0)


def as_fake_as(value: object) -> contextlib.AbstractContextManager[object]:
    """While it is entered, tensors that are made from nothing are fake if `value` is, and of the same trace."""
    return value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext()


def is_fake(value: object) -> bool:
    """Whether a tensor has no values: it stands for one while tracing."""
    return isinstance(value, FakeTensor)


@contextlib.contextmanager
def recomputed_in_backward(wanted: bool) -> Iterator[None]:
    """Nodes that are traced while it is entered run again in the backward instead of keeping their results, if `wanted`."""
    before = fx_traceback.current_meta.get("recompute")
    if wanted:
        fx_traceback.current_meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    try:
        yield
    finally:
        if wanted and before is None:
            fx_traceback.current_meta.pop("recompute", None)
        elif wanted:
            fx_traceback.current_meta["recompute"] = before
