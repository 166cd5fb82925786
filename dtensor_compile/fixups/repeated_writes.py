"""Splits operators over lists that write to one tensor twice, or read one that they have written to.

    # step is one more after it: a write is lost
    before   torch._foreach_add_([a, step, b, step], 1)
    after    torch._foreach_add_([a, step, b], 1); torch._foreach_add_([step], 1)      # two more, as in eager

Eager goes through the lists in order. AOTAutograd computes all results from the old values, and writes them back. This
happens with an optimizer two of whose parameters count their steps in one tensor.

Upstream: not reported: takes two parameters whose step is one tensor; nearest:
    https://github.com/pytorch/pytorch/issues/198033 ([inductor] torch._foreach_add_([x], [x.flip(0)]) reads x while
    writing it: silent wrong results (CUDA and CPU); an operand that is computed from the written tensor, in Inductor).
Releases: 2.11 to 2.15.
Remove when: functionalization of in-place _foreach_ operators gives eager's result for lists with a repeated tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor_compile.graph.arguments import function_of, list_arg


def write_once(gm: torch.fx.GraphModule) -> None:
    """Splits operators over lists in a Dynamo graph if a write to one tensor of a list affects another item."""
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            runs = _runs(node) if _writes_to_list(node) else []
            if len(runs) > 1 and not node.users:
                _split(node, runs)
                module.recompile()


def _writes_to_list(node: torch.fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    over_list = name.startswith(("_foreach_", "_amp_foreach_")) and name.endswith("_")
    return node.op == "call_function" and over_list and bool(node.args) and isinstance(node.args[0], (list, tuple))


def _lists(node: torch.fx.Node) -> list[Any]:
    count = len(list_arg(node, 0))
    return [
        value
        for value in (*node.args, *node.kwargs.values())
        if isinstance(value, (list, tuple)) and len(value) == count
    ]


def _runs(node: torch.fx.Node) -> list[slice]:
    """Parts of the lists, in order, in which no tensor is read or written to after it was written to."""
    begins, written, tensors = [0], set[Any](), list_arg(node, 0)
    for i, tensor in enumerate(tensors):
        if any(values[i] in written for values in _lists(node)):
            begins.append(i)
            written.clear()
        written.add(tensor)
    return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(tensors)])]


def _split(node: torch.fx.Node, runs: list[slice]) -> None:
    graph, lists = node.graph, [id(values) for values in _lists(node)]

    def part(value: Any, run: slice) -> Any:
        return value[run] if id(value) in lists else value

    with graph.inserting_before(node):
        for run in runs:
            kwargs = {name: part(value, run) for name, value in node.kwargs.items()}
            graph.call_function(function_of(node), tuple(part(value, run) for value in node.args), kwargs)
    graph.erase_node(node)
