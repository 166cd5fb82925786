"""Equal blocks of a program are traced by AOTAutograd once, and become calls of one graph.

Input: a copy of the Dynamo graph, whose nodes say to which call of a block they belong. Output: the same graph with
calls in place of these nodes. Blocks that cannot be called stay in the graph, with a decision.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

import torch

from dtensor_compile.capture.checks import shards_are_even
from dtensor_compile.compat.aot.block_graphs import example_inputs, trace_block
from dtensor_compile.compat.aot.random_state import draws
from dtensor_compile.compat.aot.tangents import Tangents
from dtensor_compile.compat.dynamo.tracing import restarts_analysis
from dtensor_compile.decisions import Decision
from dtensor_compile.errors import DTensorCompileError
from dtensor_compile.graph.nodes import across
from dtensor_compile.graph.operator_traits import SPLITS, is_view
from dtensor_compile.graph.repeated_blocks import RepeatedBlock, repeated_blocks, repeated_traces, replace_calls
from dtensor_compile.lowering.lower_collectives import runs_in_order
from dtensor_compile.ops.call_block import BlockGraph, call_graph_of_block
from dtensor_compile.stages.compilation import Compilation
from dtensor_compile.stages.joint import plan_joint_graph

T = TypeVar("T")

#: Kind of the decisions about equal blocks.
BLOCKS = "blocks"


class BlockError(Exception):
    """Calls of a block cannot have one graph; the message gives the reason."""


class GradientsDiffer(DTensorCompileError):
    """The backward pass of a call of a block gets other gradients than it was traced for."""

    def __init__(self, number: int) -> None:
        super().__init__("gradients of its results have other placements than the results")
        self.number = number


def until_gradients_fit(compile: Callable[[], T], this: Compilation) -> T:
    """The result of `compile`; it is called again without the blocks whose calls get other gradients than expected."""
    while True:
        before = this.log.mark()
        try:
            return compile()
        except GradientsDiffer as error:
            this.apart.add(error.number)
            this.log.forget_since(before)
            this.log.decided([Decision(BLOCKS, "", f"equal calls are compiled one by one: {error}")])


def share_blocks(program: torch.fx.GraphModule, this: Compilation) -> None:
    """Replaces equal blocks of a Dynamo graph by calls; their graphs are in ``this.blocks`` then."""
    marked = this.options.blocks != "once"
    blocks = repeated_blocks(program, marked=marked)
    if not blocks and repeated_traces(program, marked=marked):
        reason = "equal calls are compiled one by one: the program changes the state of torch around them"
        this.log.decided([Decision(BLOCKS, "", reason)])
    for number, block in enumerate(blocks):
        if number in this.apart:
            continue
        graphs: dict[str, BlockGraph] = {}
        before = this.log.mark()
        try:
            run = _trace(block, number, this, graphs)
        except Exception as error:  # noqa: BLE001 - whatever a stage raises
            if restarts_analysis(error) or this.options.strict and not isinstance(error, BlockError):
                raise
            this.log.forget_since(before)
            this.log.decided([Decision(BLOCKS, "", f"{len(block.calls)} equal calls are compiled one by one: {error}")])
            continue
        this.blocks.update(graphs)
        replace_calls(block, run)
        this.log.decided([Decision(BLOCKS, "", f"{len(block.calls)} equal calls are compiled once")])
    program.graph.lint()
    program.recompile()


def _trace(block: RepeatedBlock, number: int, this: Compilation, graphs: dict[str, BlockGraph]) -> Callable[..., Any]:
    """The function that replaces a block while the program is traced.

    Raises:
        BlockError: its graph cannot be called.
    """
    inputs = example_inputs(block.body)
    if any(isinstance(value, torch.SymInt) for value in inputs):
        raise BlockError("sizes are symbolic")
    if not shards_are_even(block.body):
        raise BlockError("shards are uneven")
    log = this.log.of_calls(len(block.calls))
    own = dataclasses.replace(this, program=block.body, inputs=inputs, tangents=Tangents(), order=[], log=log)

    def made(graph: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
        name = f"{number}.{len(graphs)}"
        call = _Call(graph, name, block.name)
        graphs[name] = call.graph
        return call

    return trace_block(
        block.body,
        inputs,
        joint_pass=functools.partial(_plan, this=own),
        made=made,
        base_of=lambda node: _base_and_views(node)[0],
        otherwise=lambda: GradientsDiffer(number),
        settings=None if this.aten else dict(this.options.inductor),
    )


def _plan(graph: torch.fx.Graph, this: Compilation) -> None:
    """Runs the steps on the joint graph of a block.

    Raises:
        BlockError: the graph cannot be called.
    """
    if across(graph):
        raise BlockError("it redistributes from one mesh to another")
    if any(runs_in_order(node) for node in graph.nodes):
        raise BlockError("it calls collectives of its own")
    plan_joint_graph(graph, this)


class _Call:
    """A local graph as one operator, and views of its results.

    A result that is a view is made from its view base, so that no result of the operator shares memory with another
    one, or with an input.
    """

    def __init__(self, module: torch.fx.GraphModule, name: str, of: str) -> None:
        self.name = name
        self._boxed_call = True  # read by torch, also on functions around this, which copy the attributes of the object
        graph = module.graph
        inputs = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
        (output,) = graph.find_nodes(op="output")
        made: dict[torch.fx.Node, int] = {}
        self.results: list[tuple[Any, tuple[torch.fx.Node, ...]]] = []
        for base, views in _results(output.args[0], inputs):
            if isinstance(base, torch.fx.Node):
                base = _Place(base in inputs, inputs[base] if base in inputs else made.setdefault(base, len(made)))
            self.results.append((base, views))
        output.args = (tuple(made),)
        graph.eliminate_dead_code()
        self.inputs = [place for node, place in inputs.items() if node.users]
        for node in inputs:
            if not node.users:
                graph.erase_node(node)
        _check(graph)
        module.recompile()
        drawing = any(draws(node.target) for node in graph.nodes)
        self.graph = BlockGraph(module, tuple(node.meta["val"] for node in made), drawing, of)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        tensors = [inputs[place] for place in self.inputs]
        made = call_graph_of_block(tensors, self.name) if self.graph.results else []
        results = []
        for value, views in self.results:
            if isinstance(value, _Place):
                value = (inputs if value.of_inputs else made)[value.number]
            for view in views:
                value = view.target(value, *view.args[1:], **view.kwargs)  # type: ignore[operator]
            results.append(value)
        inputs.clear()
        return results


@dataclasses.dataclass(frozen=True)
class _Place:
    """The number of an input, or of a result of the operator."""

    of_inputs: bool
    number: int


def _results(values: Sequence[Any], inputs: Container[torch.fx.Node]) -> list[tuple[Any, tuple[torch.fx.Node, ...]]]:
    """The view base of each result of a graph, and the views that make the result of it.

    The only result with a base that the graph makes is its own base if it is as contiguous as that one, so that the
    graph makes the view.
    """
    found = [_base_and_views(value) if isinstance(value, torch.fx.Node) else (value, ()) for value in values]
    with_base: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for value, (base, _) in zip(values, found, strict=True):
        if isinstance(value, torch.fx.Node):
            with_base.setdefault(base, set()).add(value)
    return [
        (value, ())
        if views and base not in inputs and len(with_base[base]) == 1 and _is_reshaped(value, base)
        else (base, views)
        for value, (base, views) in zip(values, found, strict=True)
    ]


def _base_and_views(node: torch.fx.Node) -> tuple[torch.fx.Node, tuple[torch.fx.Node, ...]]:
    """The view base of a node, and the views that make the node of it, without those that change nothing."""
    views: list[torch.fx.Node] = []
    base = node
    while _is_view(base):
        views.insert(0, base)
        base = base.all_input_nodes[0]
        if _has_layout_of(base, node):
            views.clear()
    return base, tuple(views)


def _has_layout_of(first: torch.fx.Node, second: torch.fx.Node) -> bool:
    one, other = first.meta.get("val"), second.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    layouts = [(tuple(value.shape), value.stride(), value.storage_offset()) for value in (one, other)]
    return layouts[0] == layouts[1] and _elements(one) == _elements(other)


def _is_reshaped(node: torch.fx.Node, base: torch.fx.Node) -> bool:
    one, other = node.meta.get("val"), base.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.is_contiguous() and other.is_contiguous() and _elements(one) == _elements(other)


def _elements(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, value.is_conj(), value.is_neg(), value.numel()


def _is_view(node: torch.fx.Node) -> bool:
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target in SPLITS
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and (is_view(node.target) or node.target in SPLITS) and len(node.all_input_nodes) == 1


def _check(graph: torch.fx.Graph) -> None:
    """Checks that a local graph takes and returns new tensors.

    Raises:
        BlockError: it does not.
    """
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise BlockError("it takes what is no tensor")
    (output,) = graph.find_nodes(op="output")
    made = [node.meta.get("val") for node in output.all_input_nodes]
    if not all(isinstance(value, torch.Tensor) for value in made):
        raise BlockError("it returns what is no tensor")
    storages = [value.untyped_storage()._cdata for value in (*values, *made)]
    if len(set(storages[len(values) :])) != len(made) or set(storages[: len(values)]) & set(storages[len(values) :]):
        raise BlockError("results share memory")
