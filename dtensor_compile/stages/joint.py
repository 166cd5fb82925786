"""Steps on the joint graph of forward and backward: rewriting of redistributions, removal of copies, choice of saved
tensors.
"""

from __future__ import annotations

import torch

from dtensor_compile.compat.dynamo.module_hooks import check_gradients_of_hooks
from dtensor_compile.decisions import Decision
from dtensor_compile.fixups.effect_tokens import make_tokens_real
from dtensor_compile.fixups.empty_masks import make_masks_boolean
from dtensor_compile.fixups.joined_waits import separate_waits
from dtensor_compile.fixups.spread_by_mask import spread_by_mask
from dtensor_compile.fixups.unread_collectives import drop_unread_collectives
from dtensor_compile.fixups.view_again import view_again
from dtensor_compile.graph.inline_subgraph import is_whole
from dtensor_compile.graph.nodes import across, has_even_shards, redistributions
from dtensor_compile.graph.rank_uniformity import may_use_sizes, spread_marks
from dtensor_compile.graph.runner import GraphStep, run_steps
from dtensor_compile.ir.rank_free import rank_free
from dtensor_compile.lowering.call_blocks import call_blocks
from dtensor_compile.lowering.check_memory import check_memory
from dtensor_compile.lowering.drop_copies import drop_copies
from dtensor_compile.lowering.drop_views import drop_views
from dtensor_compile.lowering.lower_collectives import hold_collectives, hold_draws, is_repeatable, order_collectives
from dtensor_compile.lowering.order_rows import order_rows, rows_left
from dtensor_compile.lowering.regather import regather
from dtensor_compile.lowering.send_transposed import columns_left, send_transposed
from dtensor_compile.passes import steps as passes
from dtensor_compile.passes.separate_redistributions import separate_redistributions
from dtensor_compile.schedule.left_alone import handed_back
from dtensor_compile.stages.compilation import Compilation
from dtensor_compile.topology.network import plans_for


def captured(graph: torch.fx.Graph, this: Compilation) -> list[Decision]:
    """Records the captured redistributions."""
    this.log.captured(graph)
    return handed_back(graph)


def planned(graph: torch.fx.Graph, this: Compilation) -> list[Decision]:
    """Records the remaining redistributions."""
    this.log.planned(graph)
    return []


def judge_ranks(graph: torch.fx.Graph, this: Compilation) -> None:
    """Notes the facts that decisions may depend on: whether ranks have the same sizes, and whether all have this
    graph."""
    this.even = this.even and all(map(has_even_shards, redistributions(graph)))
    this.between_meshes = bool(across(graph))


def check_hooks(graph: torch.fx.Graph) -> None:
    """Checks that gradients changed by hooks are those for which the graph was traced."""
    check_gradients_of_hooks()


def spread_marks_again(graph: torch.fx.Graph) -> None:
    """Marks nodes made by passes, if shards are uneven and passes therefore need marks."""
    if not may_use_sizes():
        spread_marks(graph)


def report_shapes_left(graph: torch.fx.Graph) -> list[Decision]:
    """Decisions about layouts that are left alone because only ranks of one mesh have this graph."""
    because = "ranks of only one mesh have another graph, and would make other decisions"
    return [*rows_left(graph, because), *columns_left(graph, because)]


def repeatable(graph: torch.fx.Graph, this: Compilation) -> None:
    """Notes whether the program gives the same results when it runs again."""
    this.tangents.repeatable = not this.writes and is_repeatable(graph)


#: Redistributions.
PLAN = (
    GraphStep(check_hooks, required=True, reads=True),
    GraphStep(separate_redistributions, required=True),
    GraphStep(separate_waits, required=True),
    GraphStep(make_tokens_real, required=True),
    GraphStep(make_masks_boolean, required=True),
    GraphStep(drop_unread_collectives, when=lambda this: not this.sends, required=True),
    GraphStep(captured, lambda this: (this,), reads=True),
    GraphStep(spread_marks, required=True, reads=True),
    *passes(),
    GraphStep(planned, lambda this: (this,), reads=True),
    GraphStep(judge_ranks, lambda this: (this,), required=True, reads=True),
    GraphStep(check_memory, required=True, reads=True),
    GraphStep(report_shapes_left, when=lambda this: this.between_meshes, reads=True),
)

#: Copies, guarantees of the program's operators, and tensors saved for the backward.
SHAPE = (
    GraphStep(spread_marks_again, required=True, reads=True),
    GraphStep(drop_copies),
    GraphStep(drop_views),
    GraphStep(order_rows, when=lambda this: not this.between_meshes),
    GraphStep(send_transposed, when=lambda this: not this.between_meshes),
    GraphStep(check_memory, required=True, reads=True),
    GraphStep(spread_by_mask, required=True),
    GraphStep(repeatable, lambda this: (this,), required=True, reads=True),
    GraphStep(order_collectives, required=True),
    GraphStep(hold_collectives, required=True),
    GraphStep(regather, lambda this: (this.options.regather,), reads=True),
    GraphStep(hold_draws, required=True),
    GraphStep(view_again, required=True),
    GraphStep(call_blocks, required=True),
)


def plan_joint_graph(graph: torch.fx.Graph, this: Compilation) -> None:
    """Runs the steps on the joint graph. Inductor runs its passes, and these, on called blocks too, whose graphs have
    been planned already."""
    if not is_whole(graph):
        return
    this.agreement.begin_again()
    with plans_for(this.options.topology, this.options.redistribution_memory), rank_free(this.rank_free):
        run_steps(graph, PLAN, this)
        run_steps(graph, SHAPE, this)
