"""Every ``dtensor_compile::redistribute`` and ``redistribute_across`` node becomes the functional collectives of its plan.

    before   y = redistribute(x, "S(0)", "R", mesh, [8, 4])
    after    g = all_gather_into_tensor(x, 2, group); y = wait_tensor(g)

The operator's eager kernel is traced on the fake input of the node, so what runs is what the operator means.

Collectives of a `redistribute_across` are not marked as `REDISTRIBUTES`: ranks of one mesh alone have other graphs than those of
both, so that they stay in the order of the program, as what a program sends itself does.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from dtensor_compile.capture.across import carry_out_across
from dtensor_compile.capture.redistribute import carry_out, decided_by, redistribute_op
from dtensor_compile.compat.inductor import trace_local
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import PlanError
from dtensor_compile.lowering.splice import splice, without_values
from dtensor_compile.passes.nodes import ACROSS, RECORDED_AS, REDISTRIBUTES, across, describe, redistributions, source_line

#: What a new node takes over from the node that it stands for, so that profiles and reports still name the user's code.
_INHERITED = (
    "stack_trace", "nn_module_stack", "source_fn_stack", "fwd_nn_module_stack", "fwd_source_fn_stack", "seq_nr", "original_aten", RECORDED_AS,
)  # fmt: skip


#: Expansions that were traced before, in this process, by what decides them, without fake values: those belong to one trace. Graphs
#: that are compiled again, for another size or with a pass switched off, repeat most of theirs.
_known: dict[Any, torch.fx.Graph] = {}
_MOST_KNOWN = 1 << 13


def lower_redistributions(graph: torch.fx.Graph, *, strict: bool = False) -> list[Decision]:
    """Lowers every node of `graph`. A node that cannot be lowered stays and runs through its eager kernel, and a decision says so."""
    decisions = []
    traced: dict[Any, torch.fx.Graph] = {}
    for node in (*redistributions(graph), *across(graph)):
        try:
            lower_node(node, traced)
        except Exception as error:
            if strict and isinstance(error, PlanError):
                raise PlanError(f"{node.args[0].name} of {node.meta['val'].dtype} at {source_line(node)}: {error}") from error
            if strict:
                raise
            reason = f"runs through the operator's eager kernel: {type(error).__name__}: {error}"
            warnings.warn(f"dtensor_compile: {describe(node)} at {source_line(node)} {reason}", stacklevel=2)
            decisions.append(Decision("lower_redistributions", source_line(node), reason, describe(node), describe(node)))
    return decisions


def lower_node(node: torch.fx.Node, traced: dict[Any, torch.fx.Graph]) -> None:
    """Replaces one redistribute node by the expansion of its plan.

    Args:
        traced: expansions by what decides them; layers of a model repeat theirs, and tracing one takes milliseconds.
    """
    graph, of_one_mesh = node.graph, node.target is redistribute_op
    source, *texts, shape = node.args if of_one_mesh else node.args[:-1]
    symbolic = [size for size in shape if isinstance(size, torch.fx.Node)]
    inputs = [source, *symbolic]
    value = source.meta["val"]
    fixed = not symbolic and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    key = (*texts, *shape, value.shape, value.stride(), value.dtype, value.device) if fixed else node

    def function(local: torch.Tensor, *sizes: torch.SymInt) -> torch.Tensor:
        remaining = iter(sizes)
        given = [next(remaining) if isinstance(size, torch.fx.Node) else size for size in shape]
        return carry_out(local, *texts, given) if of_one_mesh else carry_out_across(local, *texts, given, 0)

    again = key in traced
    if not again:
        lasting = (key, decided_by(*texts, shape, value.element_size())) if fixed and of_one_mesh else None
        again = lasting in _known
        traced[key] = _known[lasting] if again else trace_local(function, [n.meta["val"] for n in inputs]).graph
        if lasting is not None and not again:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[lasting] = without_values(traced[key])
    meta = {name: node.meta[name] for name in _INHERITED if name in node.meta}
    meta |= {REDISTRIBUTES: True} if of_one_mesh else {ACROSS: f"{describe(node)} of {list(shape)}"}
    with graph.inserting_before(node):
        result = splice(graph, traced[key], inputs, meta, again=again)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
