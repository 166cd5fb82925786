"""The order of the kernels that Inductor made of a lowered graph."""

from __future__ import annotations

from collections.abc import Callable

from dtensor_compile.compat.inductor.kernel_nodes import Nodes
from dtensor_compile.fixups.uncompiled import runs_uncompiled
from dtensor_compile.graph.runner import attempt
from dtensor_compile.schedule.found_order import ORDER, KernelOrder
from dtensor_compile.schedule.kernel_order import rearrange, tie_starts
from dtensor_compile.schedule.left_alone import kernels_left
from dtensor_compile.schedule.overlap import kernels_in_order
from dtensor_compile.schedule.schedule_graph import explain
from dtensor_compile.stages.compilation import Compilation


def passes_over_kernels(this: Compilation) -> tuple[Callable[[Nodes], Nodes], Callable[[Nodes], Nodes]] | None:
    """Passes over kernels before and after fusion; None if Inductor's order stays."""
    if not this.options.schedule:
        return None
    return tie_starts, lambda nodes: order_kernels(nodes, this)


def order_kernels(nodes: Nodes, this: Compilation) -> Nodes:
    """Kernels after fusion in an order in which collectives overlap with compute; if that fails, in their present
    order.
    """
    options = this.options
    found = attempt(
        "schedule_kernels",
        this,
        lambda: rearrange(
            nodes,
            topology=options.topology,
            overlap_memory=options.overlap_memory,
            measured=this.measured,
            recorded=bool(this.log.recordings),
            on_order=lambda order: _record_order(order, this),
        ),
        None,
    )
    if found is None:
        this.log.decided(this.order)
        return nodes
    return found


def _record_order(order: KernelOrder, this: Compilation) -> None:
    if order.block is not None:
        order.block.meta[ORDER] = order
    if order.ordered:
        this.log.decided([kernels_in_order(order.before, order.after, order.least)])
        this.log.decided(explain(order.tasks, order.order, order.after, order.starts))
        if this.log.recordings:
            this.log.decided(kernels_left(order))
    this.log.ordered(order)


def on_uncompiled(this: Compilation) -> Callable[[str, str], None] | None:
    """Callback that reports a graph with a kernel that does not compile; None if that is an error."""
    return None if this.options.strict else lambda graph, output: this.log.decided([runs_uncompiled(graph, output)])
