"""One wait for several collectives becomes a wait for each of them.

    before   [a, b] = all_reduce_coalesced([x, y]); w = wait_tensors([a, b]); c = w[0]; d = w[1]
    after    [a, b] = all_reduce_coalesced([x, y]); c = wait_tensor(a); d = wait_tensor(b)

The passes, the schedule and the report know one kind of wait. Each result is then waited for where it is needed, not
where the first of them is; on a release without ``wait_tensors`` torch traces the same graph.

Upstream: not reported: ``wait_tensors`` is torch's own new form, and means the same.
Releases: 2.15.
Remove when: all passes over waits know both forms.
"""

from __future__ import annotations

import operator

import torch

from dtensor_compile.compat.distributed.functional_collectives import wait_tensor, wait_tensors
from dtensor_compile.graph.arguments import list_arg
from dtensor_compile.graph.node_builder import add_call, inherited


def separate_waits(graph: torch.fx.Graph) -> None:
    """Replaces every ``wait_tensors`` in `graph` by waits for its arguments."""
    for joined in list(graph.nodes):
        if joined.target is not wait_tensors:  # None before 2.15
            continue
        with graph.inserting_before(joined):
            waits = [
                add_call(graph, wait_tensor, (start,), meta=inherited(joined), value=value)
                for start, value in zip(list_arg(joined, 0), joined.meta["val"], strict=True)
            ]
        for user in list(joined.users):
            if user.target is operator.getitem:
                user.replace_all_uses_with(waits[user.args[1]])
                graph.erase_node(user)
        if not joined.users:
            graph.erase_node(joined)
