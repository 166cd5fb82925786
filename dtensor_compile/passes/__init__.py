"""Graph passes over ``dtensor_compile::redistribute`` nodes, in the order in which they run.

Every rank runs them on its own graph and must make the same decisions, or ranks would call different collectives;
``graph/rank_uniformity.py`` limits the facts that decisions may depend on if shards are uneven.

A pass is a function ``(graph) -> list[Decision]`` in a file of its own that changes the graph in place
(`dtensor_compile.graph.runner`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dtensor_compile.decisions import Decision
from dtensor_compile.graph.runner import GraphStep
from dtensor_compile.passes.cancel_inverse_pairs import cancel_inverse_pairs
from dtensor_compile.passes.compose_across_operators import compose_across_operators
from dtensor_compile.passes.compose_redistributions import compose_redistributions
from dtensor_compile.passes.exchange_rows import exchange_rows
from dtensor_compile.passes.fill_in_target_spec import make_in_place
from dtensor_compile.passes.look_up_before_sending import look_up_before_sending
from dtensor_compile.passes.merge_sums import merge_sums
from dtensor_compile.passes.move_redistributions import move_redistributions
from dtensor_compile.passes.reduce_before_sending import reduce_before_sending
from dtensor_compile.passes.send_in_narrow_dtype import reduce_in_narrow_dtype, send_in_narrow_dtype
from dtensor_compile.passes.sequence_parallel import sequence_parallel
from dtensor_compile.passes.share_equal_redistributions import share_equal_redistributions

Pass = Callable[[torch.fx.Graph], list[Decision]]

PASSES: tuple[Pass, ...] = (
    share_equal_redistributions,
    cancel_inverse_pairs,
    compose_redistributions,
    compose_across_operators,
    reduce_before_sending,
    send_in_narrow_dtype,
    reduce_in_narrow_dtype,
    make_in_place,
    look_up_before_sending,
    exchange_rows,
    merge_sums,
    compose_redistributions,
    move_redistributions,
    sequence_parallel,
    share_equal_redistributions,
    compose_redistributions,
)

#: Opt-in passes: they may round more than another order of additions does, or assume what a graph does not say.
OPTIONAL: tuple[str, ...] = (exchange_rows.__name__, reduce_in_narrow_dtype.__name__, sequence_parallel.__name__)


def steps(passes: Sequence[Pass] = PASSES) -> tuple[GraphStep, ...]:
    """Passes as steps."""
    return tuple(GraphStep(run, asked=run.__name__ in OPTIONAL) for run in passes)
