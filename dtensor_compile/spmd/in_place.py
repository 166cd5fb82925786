"""In-place writes in a Dynamo graph, and their visibility through other views.

A redistribution is a copy. If a program writes to a tensor and reads the result through another view of the same
memory, a copy in between would lose the write. Such values stay plain and full; so do inputs that are written to, since
the caller sees them:

    h = x * 2; v = h.view(-1); h.add_(1); return v          h stays full: v is seen after the write
    h = x * 2; h.add_(1); return h                          h may be sharded: it has no other view
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from dtensor_compile.compat.dtensor.record import checkpointed
from dtensor_compile.compat.dtensor.specs import local_and_spec, storage_of
from dtensor_compile.fixups.aliased_inputs import writes_in_place

#: Functions that write to inputs besides the first (running statistics), whose names do not show it.
_KEEP_STATISTICS = frozenset({"batch_norm", "instance_norm"})


def function_name(node: torch.fx.Node) -> str:
    """Name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def written_argument(node: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor that a node writes to in place; None if there is none."""
    if not writes_in_place(node):
        return None
    target = node.kwargs.get("out", node.args[0] if node.args else node.kwargs.get("input"))
    return target if isinstance(target, torch.fx.Node) else None


def stay_whole(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes whose values must not be copied (module docstring): the first node of each shared memory."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    memory = {node: memory_of(node) for node in nodes}
    found = set()
    for node in nodes:
        if function_name(node) in _KEEP_STATISTICS:
            found |= {
                used for used in node.all_input_nodes[1:] if used.op == "placeholder" and not _needs_gradient(used)
            }
        inside = checkpointed(node)
        if inside is not None:
            written_inside = stay_whole(inside.graph)
            for inner, used in zip(inside.graph.find_nodes(op="placeholder"), node.args[1:]):
                if inner in written_inside and isinstance(used, torch.fx.Node):
                    found.add(next((other for other in nodes if memory[other] == memory[used] is not None), used))
        written = written_argument(node)
        if written is None or memory[written] is None:
            continue
        family = [other for other in nodes if memory[other] == memory[written]]
        others = [other for other in family if place[other] < place[node] and _itself(other) is not _itself(written)]
        seen = any(place[user] > place[node] for other in others for user in other.users)
        if seen or family[0].op in ("placeholder", "get_attr"):
            found.add(family[0])
    return found


def _itself(node: torch.fx.Node) -> torch.fx.Node:
    """The node that created the tensor object that an in-place operator returns."""
    written = written_argument(node)
    return node if written is None else _itself(written)


def memory_of(node: torch.fx.Node) -> int | None:
    """Identifies the memory of a node's value, to compare nodes; None if the value is not a tensor."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return None
    return storage_of(local_and_spec(value)[0] if isinstance(value, DTensor) else value)


def _needs_gradient(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad
