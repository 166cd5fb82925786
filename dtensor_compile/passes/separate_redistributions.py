"""Several redistributions in one operator become one node each, at its place.

    before   t = redistribute_together([a, b], ["S(0)", "S(0)"], ["R", "R"], ...); u = t[0]; v = t[1]
    after    u = redistribute(a, "S(0)", "R", ...); v = redistribute(b, "S(0)", "R", ...)

Results that nothing reads are not redistributed.
"""

from __future__ import annotations

import operator

import torch

from dtensor_compile.graph.arguments import const_arg, list_arg
from dtensor_compile.graph.node_builder import add_call, inherited
from dtensor_compile.ops.redistribute import redistribute_op
from dtensor_compile.ops.redistribute_together import changes_of, redistribute_together_op


def separate_redistributions(graph: torch.fx.Graph) -> None:
    """Takes every ``redistribute_together`` of `graph` apart."""
    for joined in graph.find_nodes(op="call_function", target=redistribute_together_op):
        locals_ = list_arg(joined, 0)
        dims = [local.meta["val"].dim() for local in locals_]
        changes = list(changes_of(dims, *(list_arg(joined, place) for place in range(1, 5))))
        for taken in list(joined.users):
            assert taken.target is operator.getitem, taken
            if taken.users:
                place = const_arg(taken, 1, int)
                source, target, mesh, shape = changes[place]
                with graph.inserting_before(joined):
                    separate = add_call(
                        graph,
                        redistribute_op,
                        (locals_[place], source, target, mesh, list(shape)),
                        meta={**inherited(joined), **inherited(taken)},
                        value=taken.meta["val"],
                    )
                taken.replace_all_uses_with(separate)
            graph.erase_node(taken)
        graph.erase_node(joined)
