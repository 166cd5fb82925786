"""Steps on a lowered graph, the forward and then the backward: redistributions become collectives, which are then
ordered.
"""

from __future__ import annotations

import torch

from dtensor_compile.compat.aot.symbolic.shapes import split_nary
from dtensor_compile.decisions import Decision
from dtensor_compile.fixups.send_contiguous import send_contiguous
from dtensor_compile.fixups.view_again import view_again
from dtensor_compile.graph.inline_subgraph import is_whole
from dtensor_compile.graph.runner import GraphStep, run_steps
from dtensor_compile.ir.rank_free import rank_free
from dtensor_compile.lowering.lower import lower_redistributions
from dtensor_compile.lowering.lower_collectives import lower_collectives
from dtensor_compile.lowering.receive_before_sending import receive_before_sending
from dtensor_compile.lowering.reduce_by_exchange import reduce_by_exchange
from dtensor_compile.runtime.artifacts import current_build
from dtensor_compile.schedule.fuse_matmuls import fuse_matmuls
from dtensor_compile.schedule.left_alone import communication_seconds, estimated_kernels, order_left
from dtensor_compile.schedule.overlap import bucket_collectives, decompose_matmuls
from dtensor_compile.schedule.schedule_graph import schedule_graph
from dtensor_compile.stages.compilation import Compilation
from dtensor_compile.topology.network import plans_for


def report_order_left(graph: torch.fx.Graph, this: Compilation) -> list[Decision]:
    """Decisions about nodes that keep their place in the order of the graph, for recordings."""
    return order_left(graph, this.options.topology, scheduled=this.options.schedule) if this.log.recordings else []


def lowered(graph: torch.fx.Graph, this: Compilation) -> list[Decision]:
    """Records the lowered graph."""
    if not is_whole(graph):
        return []
    this.log.lowered(graph)
    if (build := current_build()) is not None and this.digest:
        build.lowered(this.digest, graph)
    if this.log.recordings:
        this.communication += communication_seconds(graph, this.options.topology)
    return estimated_kernels() if this.measured else []


def note_collectives(graph: torch.fx.Graph, this: Compilation) -> None:
    """Notes the collectives of the graph, which this rank compares with those of other ranks."""
    if is_whole(graph):
        this.agreement.note(graph)


LOWER = (
    GraphStep(split_nary, required=True),
    GraphStep(lower_redistributions, lambda this: (this.options.strict,), required=True),
    GraphStep(lower_collectives, required=True),
    GraphStep(send_contiguous, when=lambda this: not this.aten, required=True),
)

#: Decomposition of matmuls, number and form of collectives, order of all nodes. The names are those of options.
SCHEDULE = (
    GraphStep(
        decompose_matmuls, lambda this: (this.options.topology, this.options.overlap_memory, this.even), asked=True
    ),
    GraphStep(
        bucket_collectives,
        lambda this: (this.options.topology, bucket_collectives.__name__ in this.options.enable_passes),
    ),
    GraphStep(reduce_by_exchange),
    GraphStep(schedule_graph, lambda this: (this.options.topology, this.options.overlap_memory, this.measured)),
    GraphStep(receive_before_sending, lambda this: (this.options.topology,)),
)

FINISH = (
    GraphStep(report_order_left, lambda this: (this,), when=lambda this: not this.orders_kernels, reads=True),
    GraphStep(view_again, required=True),
    GraphStep(lowered, lambda this: (this,), reads=True),
    GraphStep(note_collectives, lambda this: (this,), required=True, reads=True),
    GraphStep(fuse_matmuls),
)


def lower_graph(graph: torch.fx.Graph, this: Compilation) -> None:
    """Runs the steps on a lowered graph."""
    this.order.clear()
    steps = (*LOWER, *(SCHEDULE if this.options.schedule else ()), *FINISH)
    with plans_for(this.options.topology, this.options.redistribution_memory), rank_free(this.rank_free):
        run_steps(graph, steps, this)
