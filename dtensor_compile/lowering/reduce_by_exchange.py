"""Replaces gloo's reduce-scatter by an all-to-all and a local sum.

    before   s = reduce_scatter_tensor(x, "sum", 2, group); y = wait(s)
    after    s = all_to_all_single(x, [k, k], [k, k], group); w = wait(s); y = w[:k] + w[k:]

Rank r keeps part r of the sum over all ranks. Gloo has no reduce-scatter: torch reduces the whole input on every rank
and keeps a part, which sends the input twice (`topology/backends.py`). Exchanging the parts sends the minimum, (n-1)/n
of the input, and the additions are fused into the kernel that reads them. In a program whose equal blocks are compiled
once, what packs and adds a bucket is a graph of its own, compiled once for equal buckets: it would be most of what is
left of such a program (`lowering/call_blocks.py`).

Results are the same: with 2 ranks there is one addition, whose order does not matter. With more, parts are added in the
order of ranks, with a rounding after each as gloo does it; gloo goes around a ring that starts elsewhere for each part,
so that the last bits may differ. A mean is the sum divided by n, as torch computes it for gloo. Only these two
reductions are replaced, of dtypes that gloo exchanges, and only rank-uniform ones (`REDISTRIBUTES`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtensor_compile.compat.aot.fx import CALL
from dtensor_compile.compat.distributed.device_meshes import group_named
from dtensor_compile.compat.distributed.functional_collectives import functional, wait_tensor
from dtensor_compile.compat.dynamo.observers.module_names import module_name
from dtensor_compile.compat.inductor.compile import trace_local
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.arguments import const_arg, list_arg, node_arg, sizes_of, value_of
from dtensor_compile.graph.inline_subgraph import BLOCK, MODULE, inline
from dtensor_compile.graph.node_builder import add_call, inherited
from dtensor_compile.graph.nodes import FUSED, is_wait, source_line
from dtensor_compile.lowering.call_blocks import add_graph_call
from dtensor_compile.ops.groups import REDISTRIBUTES

aten = torch.ops.aten

_reduce_scatter = functional("reduce_scatter_tensor")
_reduce_scatters = functional("reduce_scatter_tensor_coalesced")
_all_to_all = functional("all_to_all_single")

#: With more ranks than this, one torch kernel adds the parts pairwise.
UNROLLED = 8


def reduce_by_exchange(graph: torch.fx.Graph) -> list[Decision]:
    """Replaces every sum that gloo would scatter."""
    decisions, pieces = [], _Pieces(graph)
    for node in graph.find_nodes(op="call_function", target=_reduce_scatter):
        waits = [user for user in node.users if is_wait(user)]
        if is_exchanged(node, [node_arg(node, 0)]) and len(waits) == 1 and len(node.users) == 1:
            decisions.append(_decision(node, "reduce_scatter"))
            _replace(node, waits[0], pieces)
    for node in graph.find_nodes(op="call_function", target=_reduce_scatters):
        waits = [next(iter(item.users)) for item in node.users if len(item.users) == 1]
        inputs = list_arg(node, 0)
        if is_exchanged(node, inputs) and len(waits) == len(inputs) and all(map(is_wait, waits)):
            decisions.append(_decision(node, f"reduce_scatter of {len(waits)}"))
            _replace_bucket(node, waits, pieces)
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


class _Pieces:
    """What packs and adds tensors, traced once for equal ones; inlined, or called in a graph that calls blocks."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._known: dict[Hashable, torch.fx.GraphModule] = {}
        self._calls = bool(graph.find_nodes(op="call_function", target=CALL))

    def inline(self, like: torch.fx.Node, function: Callable[..., Any], args: Sequence[Any], name: Hashable) -> Any:
        """Inlines the operators of `function` in place of `like`, at the insertion point of the graph; returns its
        result there.

        Args:
            name: of the function: equal ones do the same to equal arguments.
        """
        part, again = self._traced(like, function, args, name)
        return inline(self._graph, part.graph, args, inherited(like), again=again)

    def add(self, like: torch.fx.Node, function: Callable[..., Any], args: Sequence[Any], name: Hashable) -> Any:
        """As `inline`; where the graph calls blocks, a call of a graph of its own.

        Args:
            function: takes tensors and returns a tuple of new ones.
        """
        part, again = self._traced(like, function, args, name)
        if not self._calls or BLOCK not in part.meta:
            return inline(self._graph, part.graph, args, inherited(like), again=again)
        call = add_graph_call(self._graph, part, args, inherited(like))
        (output,) = part.graph.find_nodes(op="output")
        values = [value_of(result) for result in output.args[0]]
        call.meta["val"] = tuple(value.new_empty_strided(value.shape, value.stride()) for value in values)
        return [
            add_call(self._graph, operator.getitem, (call, index), meta=inherited(like), value=value)
            for index, value in enumerate(call.meta["val"])
        ]

    def _traced(
        self, like: torch.fx.Node, function: Callable[..., Any], args: Sequence[Any], name: Hashable
    ) -> tuple[torch.fx.GraphModule, bool]:
        """The graph of `function`, and whether it is one that was there. Without symbolic sizes it can be called."""
        values = sizes_of(args)
        facts = [_facts(value) for value in values]
        if None in facts:
            return trace_local(function, values), False
        key = (name, *facts)
        if key in self._known:
            return self._known[key], True
        traced = trace_local(function, values)
        traced.meta |= {BLOCK: f"{reduce_by_exchange.__name__}.{len(self._known)}", MODULE: module_name(like)}
        self._known[key] = traced
        return traced, False


def _replace(start: torch.fx.Node, wait: torch.fx.Node, pieces: _Pieces) -> None:
    """Replaces a collective and its wait by one exchange and a sum."""
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
        result = pieces.inline(
            start, lambda parts, rows: _reduced(parts.unflatten(0, (n, rows)), op), (done, part), (op, n)
        )
    wait.replace_all_uses_with(result)
    graph.erase_node(wait)
    graph.erase_node(start)


def _replace_bucket(start: torch.fx.Node, waits: Sequence[torch.fx.Node], pieces: _Pieces) -> None:
    """Replaces a bucket by one exchange: parts of all tensors for one rank are concatenated.

    before   s = reduce_scatter_tensor_coalesced([x, y], "sum", 2, group); a = wait(s[0]); b = wait(s[1])
    after    p = cat([x.view(2, -1), y.view(2, -1)], 1); w = wait(all_to_all_single(p)).view(2, -1)
             a = w[0, :k] + w[1, :k]; b = w[0, k:] + w[1, k:]

    Results are sums of their own and not views of one: a call copies a gradient that shares memory with another one
    (`native/native_code/gradients.h`).
    """
    graph, inputs, (op, n, _) = start.graph, list_arg(start, 0), _about(start)
    sizes = [value_of(x).numel() // n for x in inputs]
    items = sorted(start.users, key=lambda item: const_arg(item, 1, int))
    done_by = [next(iter(item.users)) for item in items]
    shapes = [value_of(wait).shape for wait in done_by]

    def pack(*tensors: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.cat([x.reshape(n, size) for x, size in zip(tensors, sizes)], 1).view(-1),)

    def add(packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts, ends = packed.view(n, sum(sizes)), list(itertools.accumulate(sizes))
        each = zip(sizes, ends, shapes)
        return tuple(_reduced(parts[:, end - size : end].view(n, *shape), op) for size, end, shape in each)

    with graph.inserting_before(start):
        (packed,) = pieces.add(start, pack, inputs, ("pack", n))
        exchange = _exchange(packed, [sum(sizes)] * n, start)
    with graph.inserting_before(min(waits)):
        results = pieces.add(start, add, (_waited(exchange, start),), (op, n, *shapes))
    for item, wait, result in zip(items, done_by, results):
        wait.replace_all_uses_with(result)
        graph.erase_node(wait)
        graph.erase_node(item)
    graph.erase_node(start)


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


def _facts(value: Any) -> Hashable | None:
    """What the trace of a function depends on; None for sizes that are symbolic."""
    numbers = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    if not all(type(number) is int for number in numbers):
        return None
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else value
