"""Several redistributions in one operator become one node each.

    before   t = redistribute_together([a, b], ["S(0)", "S(0)"], ["R", "R"], ...); u = t[0]; v = t[1]
    after    u = redistribute(a, "S(0)", "R", ...); v = redistribute(b, "S(0)", "R", ...)

Results that nothing reads are not redistributed. A partial gradient is reduced behind the node that makes it, as if it
had been traced by itself, and not where the last gradient of its group is made: until then it would be held whole.
"""

from __future__ import annotations

import operator

import torch
from torch.distributed.tensor import Partial

from dtensor_compile.graph.arguments import const_arg, list_arg
from dtensor_compile.graph.node_builder import add_call, inherited
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.ops.redistribute import redistribute_op
from dtensor_compile.ops.redistribute_together import Change, changes_of, redistribute_together_op

#: Operators on one tensor that may be between a gradient and its reduction: casts, divisions, sums over other dims.
_UNARY = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.div.Tensor,
    torch.ops.aten.view.default,
    redistribute_op,
}


def separate_redistributions(graph: torch.fx.Graph) -> None:
    """Takes every ``redistribute_together`` of `graph` apart."""
    for node in graph.find_nodes(op="call_function", target=redistribute_together_op):
        locals_ = list_arg(node, 0)
        dims = [local.meta["val"].dim() for local in locals_]
        changes = list(changes_of(dims, *(list_arg(node, place) for place in range(1, 5))))
        for taken in list(node.users):
            assert taken.target is operator.getitem, taken
            place = const_arg(taken, 1, int)
            if taken.users:
                _separate(node, taken, locals_[place], changes[place])
            graph.erase_node(taken)
        graph.erase_node(node)


def _separate(joined: torch.fx.Node, taken: torch.fx.Node, local: torch.fx.Node, change: Change) -> None:
    graph, (source, target, mesh, shape) = joined.graph, change
    sizes = [size for size in shape if isinstance(size, torch.fx.Node)]
    before = joined
    if any(isinstance(placement, Partial) for placement in parse_spec(source)):
        made, chain = local, list[torch.fx.Node]()
        while made.target in _UNARY and len(made.all_input_nodes) == 1 and len(made.users) == 1:
            chain.insert(0, made)
            (made,) = made.all_input_nodes
        if made.op == "call_function" and all(size < made for size in sizes):
            before = made.next
            for node in chain:
                if node is before:
                    before = before.next
                else:
                    before.prepend(node)
    with graph.inserting_before(before):
        separate = add_call(
            graph,
            redistribute_op,
            (local, source, target, mesh, list(shape)),
            meta={**inherited(joined), **inherited(taken)},
            value=taken.meta["val"],
        )
    taken.replace_all_uses_with(separate)
