"""Graph passes over ``dtensor_compile::redistribute`` nodes, in the order in which they run.

Every rank runs them on a graph of its own and has to come to the same end, or ranks would call different collectives; ``alike.py``
says what they may decide by where shards are uneven.

A pass is a function ``(graph) -> list[Decision]`` in a file of its own that changes the graph in place. What a pass that raises
has changed until then is taken back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from dtensor_compile.compat.aot.fx import SavedGraph, copy_of_graph, put_back
from dtensor_compile.decisions import Decision
from dtensor_compile.graph.rank_uniformity import sizes_differ, spread_marks
from dtensor_compile.passes.cancel_inverse_pairs import cancel_inverse_pairs
from dtensor_compile.passes.compose_across_operators import compose_across_operators
from dtensor_compile.passes.compose_redistributions import compose_redistributions
from dtensor_compile.passes.exchange_rows import exchange_rows
from dtensor_compile.passes.look_up_before_sending import look_up_before_sending
from dtensor_compile.passes.fill_in_target_spec import make_in_place
from dtensor_compile.passes.merge_sums import merge_sums
from dtensor_compile.passes.move_redistributions import move_redistributions
from dtensor_compile.graph.nodes import has_even_shards, redistributions
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

#: Those that run only where the user asks for them: they may round more than another order of additions does, or take on trust what
#: a graph does not say.
OPTIONAL: tuple[str, ...] = (exchange_rows.__name__, reduce_in_narrow_dtype.__name__, sequence_parallel.__name__)


def run_passes(
    graph: torch.fx.Graph,
    passes: Sequence[Pass] | None = None,
    *,
    disabled: Sequence[str] = (),
    enabled: Sequence[str] = (),
    strict: bool = False,
) -> list[Decision]:
    """Runs the passes in order and returns what they decided.

    Args:
        passes: other ones than `PASSES`.
        disabled: names of passes that do not run.
        enabled: names of `OPTIONAL` ones that do.

    A pass that raises is dropped with a warning and a decision that says so; with `strict` its exception goes on.
    """
    decisions: list[Decision] = []
    saved: SavedGraph | None = None
    uneven = not all(map(has_even_shards, redistributions(graph)))
    out_of_play = {*disabled, *(name for name in OPTIONAL if name not in enabled)}
    chosen = [run for run in (PASSES if passes is None else passes) if run.__name__ not in out_of_play]
    if uneven or passes is None:
        spread_marks(graph)
    for run in chosen:
        name = run.__name__
        if saved is None and not strict:
            saved = copy_of_graph(graph)
        try:
            with sizes_differ(uneven):
                made = run(graph)
            graph.lint()
            decisions += made
            if made:  # a pass that decides nothing changes nothing
                saved = None
        except Exception as error:
            if saved is None:
                raise
            put_back(graph, saved)
            saved = None
            decisions.append(dropped(name, error))
    return decisions


def dropped(name: str, error: Exception) -> Decision:
    """Warns that a pass raised and was dropped; the decision that says so."""
    reason = f"pass dropped: {type(error).__name__}: {error}"
    warnings.warn(f'dtensor_compile: {name}: {reason}; options={{"strict": True}} raises instead', stacklevel=3)
    return Decision(name, "", reason, left_alone=True)
