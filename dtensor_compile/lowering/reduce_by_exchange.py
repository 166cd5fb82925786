"""On gloo a sum is scattered by exchanging its parts and adding them where they belong.

    before   s = reduce_scatter_tensor(x, "sum", 2, group); y = wait(s)
    after    s = all_to_all_single(x, [k, k], [k, k], group); w = wait(s); y = w[:k] + w[k:]

Rank r keeps part r of the sum over all ranks. Gloo has no reduce-scatter: torch lets it reduce the whole on every rank
and keeps a part, which sends the input twice over (`topology/backends.py`). Exchanging the parts sends what has to be
sent, (n-1)/n of the input, and the additions become part of the kernel that reads them.

The same numbers: with 2 ranks there is one addition, whose order does not matter. With more, parts are added in the
order of ranks, with a rounding after each as gloo does it; gloo goes around a ring that starts elsewhere for each part,
so that the last bits may differ. A mean is the sum divided by n, as torch computes it for gloo. Only these two, of
numbers that gloo exchanges, and only what all ranks run alike (`REDISTRIBUTES`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.distributed.device_meshes import group_named
from dtensor_compile.compat.distributed.functional_collectives import functional, wait_tensor
from dtensor_compile.compat.inductor.compile import trace_local
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.inline_subgraph import splice
from dtensor_compile.graph.nodes import FUSED, REDISTRIBUTES, is_wait, source_line

_reduce_scatter = functional("reduce_scatter_tensor")
_reduce_scatters = functional("reduce_scatter_tensor_coalesced")
_all_to_all = functional("all_to_all_single")

#: More ranks than this have each part added pairwise by one kernel of torch's.
UNROLLED = 8


def reduce_by_exchange(graph: torch.fx.Graph) -> list[Decision]:
    """Replaces every sum that gloo would scatter."""
    decisions = []
    traced: dict[Any, torch.fx.Graph] = {}
    for node in graph.find_nodes(op="call_function", target=_reduce_scatter):
        waits = [user for user in node.users if is_wait(user)]
        if is_exchanged(node, [node.args[0]]) and len(waits) == 1 and len(node.users) == 1:
            decisions.append(_decision(node, "reduce_scatter"))
            _replace(node, waits[0], traced)
    for node in graph.find_nodes(op="call_function", target=_reduce_scatters):
        waits = [next(iter(item.users)) for item in node.users if len(item.users) == 1]
        if is_exchanged(node, node.args[0]) and len(waits) == len(node.args[0]) and all(map(is_wait, waits)):
            decisions.append(_decision(node, f"reduce_scatter of {len(waits)}"))
            _replace_bucket(node, waits)
    return decisions


def is_exchanged(node: torch.fx.Node, inputs: Sequence[torch.fx.Node]) -> bool:
    """Whether a reduce_scatter of `inputs` becomes an exchange."""
    op, group = node.args[1], node.args[3]
    if op not in ("sum", "avg") or REDISTRIBUTES not in node.meta or FUSED in node.meta:
        return False
    values = [x.meta["val"] for x in inputs]
    if op == "avg" and not values[0].is_floating_point():
        return False  # gloo refuses to average integers
    return all(on_gloo(group, value) for value in values)


def _decision(node: torch.fx.Node, text: str) -> Decision:
    reason = f"gloo would reduce all of it on each of the {node.args[2]} ranks, which sends twice as much"
    return Decision("reduce_by_exchange", source_line(node), reason, text, "all_to_all + sum")


def on_gloo(group: str, x: torch.Tensor) -> bool:
    """Whether a tensor is sent by gloo, as it is, over the group of that name."""
    found = group_named(group)
    on_cpu = x.device.type == "cpu" and not x.is_complex() and x.dtype != torch.bool
    return (
        on_cpu and found is not None and dist.get_backend(found) in ("gloo", "fake")
    )  # a simulated job is one of gloo on CPUs


def _reduced(parts: torch.Tensor, op: str) -> torch.Tensor:
    """What `op` makes of the first dim of `parts`, in the order of ranks."""
    n = parts.shape[0]
    if n > UNROLLED:
        total = parts.sum(0, dtype=parts.dtype)
    else:
        total = parts[0]
        for rank in range(1, n):
            total = total + parts[rank]
    return total / n if op == "avg" else total


def _replace(start: torch.fx.Node, wait: torch.fx.Node, traced: dict[Any, torch.fx.Graph]) -> None:
    """One exchange and a sum in the place of a collective and its wait; `traced` holds sums by what decides them."""
    graph, (x, op, n, group) = start.graph, start.args
    rows: Any = x.meta["val"].shape[0] // n
    inherited = _inherited(start)
    with graph.inserting_before(start):
        part = rows
        if isinstance(rows, torch.SymInt):
            size = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
            part = graph.call_function(operator.floordiv, (size, n))
            size.meta, part.meta = {**inherited, "val": x.meta["val"].shape[0]}, {**inherited, "val": rows}
        exchange = _exchange(x, [part] * n, group, inherited)
    with graph.inserting_before(wait):
        done = _waited(exchange, inherited)
        value = done.meta["val"]
        key = (
            (op, n, rows, value.shape, value.dtype, value.device)
            if all(isinstance(size, int) for size in (rows, *value.shape))
            else start
        )
        again = key in traced
        if not again:
            sizes = (value, part if isinstance(part, int) else part.meta["val"])
            traced[key] = trace_local(lambda parts, rows: _reduced(parts.unflatten(0, (n, rows)), op), sizes).graph
        result = splice(graph, traced[key], (done, part), inherited, again=again)
    wait.replace_all_uses_with(result)
    graph.erase_node(wait)
    graph.erase_node(start)


def _replace_bucket(start: torch.fx.Node, waits: Sequence[torch.fx.Node]) -> None:
    """Parts for one rank of all tensors lie together, so that the bucket is one exchange.

    before   s = reduce_scatter_tensor_coalesced([x, y], "sum", 2, group); a = wait(s[0]); b = wait(s[1])
    after    p = cat([x.view(2, -1), y.view(2, -1)], 1); w = wait(all_to_all_single(p)).view(2, -1)
             a = w[0, :k] + w[1, :k]; b = w[0, k:] + w[1, k:]
    """
    graph, (inputs, op, n, group) = start.graph, start.args
    sizes = [x.meta["val"].numel() // n for x in inputs]
    inherited = _inherited(start)

    def pack(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.reshape(n, size) for x, size in zip(tensors, sizes)], 1).view(-1)

    with graph.inserting_before(start):
        packed = _traced(graph, pack, inputs, inherited)
        exchange = _exchange(packed, [sum(sizes)] * n, group, inherited)
    order = {node: index for index, node in enumerate(graph.nodes)}
    with graph.inserting_before(min(waits, key=order.__getitem__)):
        done, first = _waited(exchange, inherited), 0
        for size, item in zip(sizes, sorted(start.users, key=lambda item: item.args[1])):
            (wait,) = item.users
            part = _part((n, sum(sizes)), slice(first, first + size), wait.meta["val"].shape, op)
            wait.replace_all_uses_with(_traced(graph, part, (done,), _inherited(wait)))
            first += size
    for item in list(start.users):
        for wait in list(item.users):
            graph.erase_node(wait)
        graph.erase_node(item)
    graph.erase_node(start)


def _part(
    packed: tuple[int, int], where: slice, shape: Sequence[int], op: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda parts: _reduced(parts.view(packed)[:, where], op).view(shape)


def _inherited(node: torch.fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key != "val"}


def _exchange(x: torch.fx.Node, splits: list[Any], group: str, inherited: dict[str, Any]) -> torch.fx.Node:
    made = x.graph.call_function(_all_to_all, (x, splits, splits, group))
    made.meta = {**inherited, "val": x.meta["val"].new_empty(x.meta["val"].shape)}
    return made


def _waited(exchange: torch.fx.Node, inherited: dict[str, Any]) -> torch.fx.Node:
    done = exchange.graph.call_function(wait_tensor, (exchange,))
    done.meta = {**inherited, "val": exchange.meta["val"].new_empty(exchange.meta["val"].shape)}
    return done


def _traced(
    graph: torch.fx.Graph, function: Callable[..., torch.Tensor], args: Sequence[Any], inherited: dict[str, Any]
) -> torch.fx.Node:
    """The operators of `function`, put in where `graph` inserts; the node of its result."""
    part = trace_local(function, [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args]).graph
    return splice(graph, part, args, inherited, again=False)
