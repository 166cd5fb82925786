"""Every ``dtensor_compile::redistribute`` and ``redistribute_across`` node becomes the functional collectives of its
plan.

    before   y = redistribute(x, "S(0)", "R", mesh, [8, 4])
    after    g = all_gather_into_tensor(x, 2, group); y = wait_tensor(g)

The expansion is the operator's eager kernel, traced on the fake input of the node.

Collectives of a `redistribute_across` are not marked as `REDISTRIBUTES`: ranks of only one of the meshes have other
graphs than those of both, so that they stay in the order of the program, like collectives of the program itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dtensor_compile.bounded_cache import BoundedCache
from dtensor_compile.compat.aot.symbolic.shapes import expressions, has_hint
from dtensor_compile.compat.distributed.device_meshes import my_rank
from dtensor_compile.compat.inductor.compile import trace_local
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import PlanError
from dtensor_compile.graph.arguments import const_arg, list_arg, node_arg, sizes_of, value_of
from dtensor_compile.graph.inline_subgraph import cut_out, inline, without_values
from dtensor_compile.graph.node_builder import add_call
from dtensor_compile.graph.nodes import (
    ACROSS,
    RECORDED_AS,
    across,
    describe,
    redistribution_cost,
    redistribution_of,
    redistributions,
    source_line,
)
from dtensor_compile.ir.mesh import parse_mesh
from dtensor_compile.ir.spec import parse_spec
from dtensor_compile.ops.expand import local_shape
from dtensor_compile.ops.groups import GROUP, REDISTRIBUTES
from dtensor_compile.ops.redistribute import carry_out, decided_by, redistribute_op
from dtensor_compile.ops.redistribute_across import carry_out_across

#: Metadata that a new node inherits from the replaced node, so that profiles and reports still name the user's code.
_INHERITED = (
    "stack_trace", "nn_module_stack", "source_fn_stack", "fwd_nn_module_stack", "fwd_source_fn_stack", "seq_nr",
    "original_aten", RECORDED_AS, GROUP,
)  # fmt: skip


#: Expansions traced before in this process, by key, without fake values, which belong to one trace. Recompiled graphs,
#: for another size or with a pass disabled, repeat most of theirs.
_known: BoundedCache[Any, torch.fx.Graph] = BoundedCache(1 << 13)


class _Expansion(NamedTuple):
    """The expansion of a redistribute node.

    Attributes:
        key: cache key within one graph.
        of_one_mesh: whether it redistributes on one mesh.
        texts, shape: arguments of the operator, besides the local tensor: two specs, and one mesh or two.
        inputs: the local tensor, and the symbolic sizes.
        fixed: whether no size is symbolic.
    """

    key: Any
    of_one_mesh: bool
    texts: tuple[str, ...]
    shape: Sequence[Any]
    inputs: list[torch.fx.Node]
    fixed: bool

    @classmethod
    def of(cls, node: torch.fx.Node) -> _Expansion:
        of_one_mesh = node.target is redistribute_op
        last = 4 if of_one_mesh else 5
        source, shape = node_arg(node, 0), list_arg(node, last)
        texts = tuple(const_arg(node, place, str) for place in range(1, last))
        symbolic = [size for size in shape if isinstance(size, torch.fx.Node)]
        value, sizes = value_of(source), sizes_of(shape)
        extents = (*sizes, *value.shape, *value.stride())
        fixed = not symbolic and all(isinstance(size, int) for size in extents)
        decides = (
            of_one_mesh,
            *texts,
            *map(type, extents),
            *expressions(extents),
            len(value.shape),
            value.dtype,
            value.device,
        )
        # Tracing may add checks for an unbacked SymInt, which copies of the expansion would lack.
        key = decides if all(map(has_hint, extents)) else node
        return cls(key, of_one_mesh, texts, shape, [source, *symbolic], fixed)

    def lasting(self) -> Any:
        """Cache key for all graphs of this process, or None; makes process groups that the expansion needs."""
        if not (self.fixed and self.of_one_mesh):
            return None
        source, target, mesh = self.texts
        return self.key, decided_by(source, target, mesh, self.shape, value_of(self.inputs[0]).element_size())

    def function(self, local: torch.Tensor, *sizes: torch.SymInt) -> torch.Tensor:
        """The function to trace on the values of `inputs`."""
        remaining = iter(sizes)
        given = [next(remaining) if isinstance(size, torch.fx.Node) else size for size in self.shape]
        if self.of_one_mesh:
            source, target, mesh = self.texts
            return carry_out(local, source, target, mesh, given)
        source, target, source_mesh, target_mesh = self.texts
        return carry_out_across(local, source, target, source_mesh, target_mesh, given, 0)


def lower_redistributions(graph: torch.fx.Graph, strict: bool = False) -> list[Decision]:
    """Lowers every node of `graph`. A node that cannot be lowered stays and runs through its eager kernel, and a
    decision says so.
    """
    decisions: list[Decision] = []
    nodes = [*redistributions(graph), *across(graph)]
    for node in redistributions(graph):
        _make_sizes_static(node)
    traced: dict[Any, torch.fx.Graph] = {}
    fresh = _trace_together(nodes, decisions)
    for node in nodes:
        try:
            _lower_node(node, traced, fresh)
        except Exception as error:
            if strict and isinstance(error, PlanError):
                raise PlanError(
                    f"{node_arg(node, 0).name} of {value_of(node).dtype} at {source_line(node)}: {error}"
                ) from error
            if strict:
                raise
            reason = f"runs through the operator's eager kernel: {type(error).__name__}: {error}"
            warnings.warn(f"dtensor_compile: {describe(node)} at {source_line(node)} {reason}", stacklevel=2)
            text, sent = describe(node), _bytes_sent(node)
            decisions.append(
                Decision("lower_redistributions", source_line(node), reason, text, text, left_alone=True, bytes=sent)
            )
    return decisions


def _bytes_sent(node: torch.fx.Node) -> int | None:
    """Bytes that the eager kernel of a node sends; None without a plan."""
    if node.target is not redistribute_op:
        return None
    try:
        return redistribution_cost(redistribution_of(node), value_of(node).element_size()).bytes
    except PlanError:
        return None


def _make_sizes_static(node: torch.fx.Node) -> None:
    """Gives a local tensor of an integer global shape integer sizes, even if it is computed with symbolic ones.

        before   g = mm(t, x): [2*(s//2), 8]; y = redistribute(g, "P", "S(0)", mesh, [4, 8])
        after    g = mm(t, x); h = reshape(g, [4, 8]); y = redistribute(h, "P", "S(0)", mesh, [4, 8])

    The collective then has these sizes, by which it can be merged.
    """
    this = redistribution_of(node)
    value = this.local.meta["val"]
    layout = parse_mesh(this.mesh)
    coordinate = layout.coordinate(my_rank())
    if (
        coordinate is None
        or not all(isinstance(size, int) for size in this.shape)
        or all(isinstance(size, int) for size in value.shape)
    ):
        return
    sizes = local_shape(parse_spec(this.source), layout, coordinate, this.shape)
    meta = {name: this.local.meta[name] for name in _INHERITED if name in this.local.meta}
    with node.graph.inserting_before(node):
        known = add_call(
            node.graph, torch.ops.aten.reshape.default, (this.local, sizes), meta=meta, value=value.new_empty(sizes)
        )
    node.replace_input_with(this.local, known)


def _lower_node(node: torch.fx.Node, traced: dict[Any, torch.fx.Graph], fresh: Mapping[Any, torch.fx.Graph]) -> None:
    """Replaces one redistribute node by the expansion of its plan.

    Args:
        traced: expansions that are in the graph, by key; layers of a model repeat theirs, and tracing one takes
            milliseconds.
        fresh: expansions that are not in the graph yet, with fake values of this graph.
    """
    graph, this = node.graph, _Expansion.of(node)
    again = this.key in traced
    if not again:
        lasting = this.lasting()
        again = lasting in _known
        if again:
            traced[this.key] = _known[lasting]
        else:
            part = fresh.get(this.key)
            traced[this.key] = (
                part if part is not None else trace_local(this.function, [n.meta["val"] for n in this.inputs]).graph
            )
            if lasting is not None:
                _known[lasting] = without_values(traced[this.key])
    meta = {name: node.meta[name] for name in _INHERITED if name in node.meta}
    meta |= {REDISTRIBUTES: True} if this.of_one_mesh else {ACROSS: f"{describe(node)} of {list(this.shape)}"}
    with graph.inserting_before(node):
        result = inline(graph, traced[this.key], this.inputs, meta, again=again)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _trace_together(nodes: Sequence[torch.fx.Node], decisions: list[Decision]) -> dict[Any, torch.fx.Graph]:
    """Traces cacheable expansions that are not cached yet together, by key: each trace has a fixed cost of a
    millisecond.

    Returns nothing, with a decision, if one of them fails: tracing each by itself then finds the failing one.
    """
    wanted: dict[Any, _Expansion] = {}
    try:
        for node in nodes:
            this = _Expansion.of(node)
            if this.key not in wanted and (lasting := this.lasting()) is not None and lasting not in _known:
                wanted[this.key] = this
        sources = list(dict.fromkeys(this.inputs[0] for this in wanted.values()))
        values = [source.meta["val"] for source in sources]
        if len(wanted) < 2 or len(set(map(id, values))) < len(
            values
        ):  # a trace distinguishes arguments by their values
            return {}

        def function(*given: torch.Tensor) -> list[torch.Tensor]:
            local = dict(zip(sources, given))
            return [this.function(local[this.inputs[0]]) for this in wanted.values()]

        whole = trace_local(function, values).graph
    except Exception as error:  # noqa: BLE001
        reason = f"traced one by one, which takes a millisecond of compilation each: {type(error).__name__}: {error}"
        text = f"{len(nodes)} redistributions"
        decisions.append(Decision("lower_redistributions", source_line(nodes[0]), reason, text, text, left_alone=True))
        return {}
    inputs = dict(zip(sources, whole.find_nodes(op="placeholder")))
    results = list_arg(whole.output_node(), 0)
    return {key: cut_out(result, inputs[this.inputs[0]]) for (key, this), result in zip(wanted.items(), results)}
