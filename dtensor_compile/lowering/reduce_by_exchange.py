"""Replaces gloo's reduce-scatter by an all-to-all and a local sum.

    before   s = reduce_scatter_tensor(x, "sum", 2, group); y = wait(s)
    after    s = all_to_all_single(x, [k, k], [k, k], group); w = wait(s); y = w[:k] + w[k:]

Rank r keeps part r of the sum over all ranks. Gloo has no reduce-scatter: torch reduces the whole input on every rank
and keeps a part, which sends the input twice (`topology/backends.py`). Exchanging the parts sends the minimum, (n-1)/n
of the input, and the additions are fused into the kernel that reads them.

Results are the same: with 2 ranks there is one addition, whose order does not matter. With more, parts are added in the
order of ranks, with a rounding after each as gloo does it; gloo goes around a ring that starts elsewhere for each part,
so that the last bits may differ. A mean is the sum divided by n, as torch computes it for gloo. Only these two
reductions are replaced, of dtypes that gloo exchanges, and only rank-uniform ones (`REDISTRIBUTES`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.distributed.device_meshes import group_named
from dtensor_compile.compat.distributed.functional_collectives import functional, wait_tensor
from dtensor_compile.compat.inductor.compile import trace_local
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import const_arg, list_arg, node_arg, sizes_of, value_of
from dtensor_compile.graph.inline_subgraph import inline
from dtensor_compile.graph.node_builder import add_call, inherited
from dtensor_compile.graph.nodes import FUSED, is_wait, source_line
from dtensor_compile.ops.groups import REDISTRIBUTES

aten = torch.ops.aten

_reduce_scatter = functional("reduce_scatter_tensor")
_reduce_scatters = functional("reduce_scatter_tensor_coalesced")
_all_to_all = functional("all_to_all_single")

#: With more ranks than this, one torch kernel adds the parts pairwise.
UNROLLED = 8


def reduce_by_exchange(graph: torch.fx.Graph) -> list[Decision]:
    """Replaces every sum that gloo would scatter."""
    decisions = []
    traced: dict[Any, torch.fx.Graph] = {}
    for node in graph.find_nodes(op="call_function", target=_reduce_scatter):
        waits = [user for user in node.users if is_wait(user)]
        if is_exchanged(node, [node_arg(node, 0)]) and len(waits) == 1 and len(node.users) == 1:
            decisions.append(_decision(node, "reduce_scatter"))
            _replace(node, waits[0], traced)
    for node in graph.find_nodes(op="call_function", target=_reduce_scatters):
        waits = [next(iter(item.users)) for item in node.users if len(item.users) == 1]
        inputs = list_arg(node, 0)
        if is_exchanged(node, inputs) and len(waits) == len(inputs) and all(map(is_wait, waits)):
            decisions.append(_decision(node, f"reduce_scatter of {len(waits)}"))
            _replace_bucket(node, waits, traced)
    return decisions


def is_exchanged(node: torch.fx.Node, inputs: Sequence[torch.fx.Node]) -> bool:
    """Whether a reduce_scatter of `inputs` becomes an exchange."""
    op, group = const_arg(node, 1, str), const_arg(node, 3, str)
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
    """Whether gloo sends a tensor, without conversion, over the group of that name."""
    found = group_named(group)
    on_cpu = x.device.type == "cpu" and not x.is_complex() and x.dtype != torch.bool
    return (
        on_cpu and found is not None and dist.get_backend(found) in ("gloo", "fake")
    )  # a simulated job is one of gloo on CPUs


def _reduced(parts: torch.Tensor, op: str) -> torch.Tensor:
    """The reduction `op` over the first dim of `parts`, in the order of ranks."""
    n = parts.shape[0]
    if n > UNROLLED:
        total = parts.sum(0, dtype=parts.dtype)
    else:
        total = parts[0]
        for rank in range(1, n):
            total = total + parts[rank]
    return total / n if op == "avg" else total


def _replace(start: torch.fx.Node, wait: torch.fx.Node, traced: dict[Any, torch.fx.Graph]) -> None:
    """Replaces a collective and its wait by one exchange and a sum; `traced` caches traced sums by key."""
    graph, x, (op, n, _) = start.graph, node_arg(start, 0), _about(start)
    size = value_of(x).shape[0]
    rows: Any = size // n
    meta = inherited(start)
    with graph.inserting_before(start):
        part = rows
        if isinstance(rows, torch.SymInt):
            whole = add_call(graph, aten.sym_size.int, (x, 0), meta=meta, value=size)
            part = add_call(graph, operator.floordiv, (whole, n), meta=meta, value=rows)
        exchange = _exchange(x, [part] * n, start)
    with graph.inserting_before(wait):
        done = _waited(exchange, start)
        result = _traced(
            start, lambda parts, rows: _reduced(parts.unflatten(0, (n, rows)), op), (done, part), (op, n), traced
        )
    wait.replace_all_uses_with(result)
    graph.erase_node(wait)
    graph.erase_node(start)


def _replace_bucket(start: torch.fx.Node, waits: Sequence[torch.fx.Node], traced: dict[Any, torch.fx.Graph]) -> None:
    """Replaces a bucket by one exchange: parts of all tensors for one rank are concatenated.

    before   s = reduce_scatter_tensor_coalesced([x, y], "sum", 2, group); a = wait(s[0]); b = wait(s[1])
    after    p = cat([x.view(2, -1), y.view(2, -1)], 1); w = wait(all_to_all_single(p)).view(2, -1)
             a = w[0, :k] + w[1, :k]; b = w[0, k:] + w[1, k:]

    Results are sums of their own and not views of one: a call copies a gradient that shares memory with another one
    (`native/native_code/gradients.h`).
    """
    graph, inputs, (op, n, _) = start.graph, list_arg(start, 0), _about(start)
    sizes = [value_of(x).numel() // n for x in inputs]

    def pack(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.reshape(n, size) for x, size in zip(tensors, sizes)], 1).view(-1)

    with graph.inserting_before(start):
        packed = _traced(start, pack, inputs, ("pack", n), traced)
        exchange = _exchange(packed, [sum(sizes)] * n, start)
    order = {node: index for index, node in enumerate(graph.nodes)}
    with graph.inserting_before(min(waits, key=order.__getitem__)):
        done, first = _waited(exchange, start), 0
        for size, item in zip(sizes, sorted(start.users, key=lambda item: const_arg(item, 1, int))):
            (wait,) = item.users
            shape = value_of(wait).shape
            part = _part((n, sum(sizes)), slice(first, first + size), shape, op)
            wait.replace_all_uses_with(_traced(wait, part, (done,), (op, n, first, shape), traced))
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


def _about(start: torch.fx.Node) -> tuple[str, int, str]:
    """Reduction, number of ranks and group of a reduce_scatter."""
    return const_arg(start, 1, str), const_arg(start, 2, int), const_arg(start, 3, str)


def _exchange(x: torch.fx.Node, splits: list[Any], like: torch.fx.Node) -> torch.fx.Node:
    """An exchange of `x` over the group of `like`."""
    args, value = (x, splits, splits, _about(like)[2]), value_of(x)
    return add_call(x.graph, _all_to_all, args, meta=inherited(like), value=value.new_empty(value.shape))


def _waited(exchange: torch.fx.Node, like: torch.fx.Node) -> torch.fx.Node:
    value = value_of(exchange)
    meta = inherited(like)
    return add_call(exchange.graph, wait_tensor, (exchange,), meta=meta, value=value.new_empty(value.shape))


def _traced(
    like: torch.fx.Node,
    function: Callable[..., torch.Tensor],
    args: Sequence[Any],
    name: Hashable,
    traced: dict[Any, torch.fx.Graph],
) -> torch.fx.Node:
    """Inlines the operators of `function` in place of `like`, at the insertion point of its graph; returns the node of
    the result.

    Args:
        name: of the function: equal ones do the same to equal arguments.
        traced: graphs of functions by name and arguments.
    """
    values = sizes_of(args)
    facts = [_facts(value) for value in values]
    key = like if None in facts else (name, *facts)
    again = key in traced
    if not again:
        traced[key] = trace_local(function, values).graph
    return inline(like.graph, traced[key], args, inherited(like), again=again)


def _facts(value: Any) -> Hashable | None:
    """What the trace of a function depends on; None for sizes that are symbolic."""
    numbers = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    if not all(type(number) is int for number in numbers):
        return None
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else value
